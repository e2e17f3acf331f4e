// Calls that read and change a file's mode, owner, times and attributes.

#include "calls.h"
#include "paths.h"
#include "system.h"
#include "tree.h"

#include <cerrno>
#include <fcntl.h>
#include <limits.h>
#include <string>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>
#include <utime.h>

namespace pytracer::view {

namespace {

int failed(int error) {
  errno = error;
  return -1;
}

// Makes a private version of what is to get another mode, owner, time or size.
bool bring_to_change(Place& place) {
  uid_t user = geteuid();
  if (place.is_covered && place.kind == Place::kReal && user != 0 && place.status.st_uid != user) {
    errno = EPERM;
    return false;
  }
  return bring(place);
}

// Where the descriptor's file is to be changed by its path, because it is a real one; "" if not.
std::string to_change(int descriptor) {
  if (!is_on()) {
    return "";
  }
  char target[PATH_MAX];
  std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  long size = sys(SYS_readlinkat, AT_FDCWD, link.c_str(), target, sizeof target);
  if (size <= 0 || target[0] != '/') {
    return "";
  }
  std::string path(target, size_t(size));
  if (shown(path) != path) {
    return "";
  }
  Place place = locate(AT_FDCWD, path.c_str(), false);
  return place.exists() && place.is_covered && bring_to_change(place) ? place.at() : "";
}

template <typename Change>
int change(int folder, const char* path, bool follow, Change&& what) {
  Place place = locate(folder, path, follow);
  return bring_to_change(place) ? int(what(place.at().c_str())) : -1;
}

template <typename Read>
long read_at(const char* path, bool follow, Read&& what) {
  if (!is_on()) {
    return what(path);
  }
  Place place = locate(AT_FDCWD, path, follow);
  return place.exists() ? what(place.at().c_str()) : failed(place.error);
}

}  // namespace

int chmod_in(int folder, const char* path, mode_t mode) {
  if (!is_on()) {
    return int(sys(SYS_fchmodat, folder, path, mode));
  }
  return change(
      folder, path, true, [&](const char* at) { return sys(SYS_fchmodat, AT_FDCWD, at, mode); });
}

int chown_in(int folder, const char* path, uid_t user, gid_t group, int flags) {
  if (!is_on() || (flags & AT_EMPTY_PATH)) {
    return int(sys(SYS_fchownat, folder, path, user, group, flags));
  }
  return change(folder, path, !(flags & AT_SYMLINK_NOFOLLOW), [&](const char* at) {
    return sys(SYS_fchownat, AT_FDCWD, at, user, group, flags);
  });
}

int times_in(int folder, const char* path, const struct timespec* times, int flags) {
  if (path == nullptr) {
    std::string at = to_change(folder);
    return at.empty() ? int(sys(SYS_utimensat, folder, nullptr, times, flags))
                      : int(sys(SYS_utimensat, AT_FDCWD, at.c_str(), times, 0));
  }
  if (!is_on()) {
    return int(sys(SYS_utimensat, folder, path, times, flags));
  }
  return change(folder, path, !(flags & AT_SYMLINK_NOFOLLOW), [&](const char* at) {
    return sys(SYS_utimensat, AT_FDCWD, at, times, flags);
  });
}

namespace {

int utimes_in(int folder, const char* path, const struct timeval* times, int flags) {
  if (times == nullptr) {
    return times_in(folder, path, nullptr, flags);
  }
  struct timespec exact[2];
  for (int i = 0; i < 2; i++) {
    exact[i] = {times[i].tv_sec, times[i].tv_usec * 1000};
  }
  return times_in(folder, path, exact, flags);
}

}  // namespace
}  // namespace pytracer::view

using namespace pytracer::view;

REPLACES(int, chmod, const char* path, mode_t mode) {
  return chmod_in(AT_FDCWD, path, mode);
}

REPLACES(int, fchmodat, int folder, const char* path, mode_t mode, int) {
  return chmod_in(folder, path, mode);
}

REPLACES(int, fchmod, int file, mode_t mode) {
  std::string at = to_change(file);
  return int(at.empty() ? sys(SYS_fchmod, file, mode)
                        : sys(SYS_fchmodat, AT_FDCWD, at.c_str(), mode));
}

REPLACES(int, chown, const char* path, uid_t user, gid_t group) {
  return chown_in(AT_FDCWD, path, user, group, 0);
}

REPLACES(int, lchown, const char* path, uid_t user, gid_t group) {
  return chown_in(AT_FDCWD, path, user, group, AT_SYMLINK_NOFOLLOW);
}

REPLACES(int, fchownat, int folder, const char* path, uid_t user, gid_t group, int flags) {
  return chown_in(folder, path, user, group, flags);
}

REPLACES(int, fchown, int file, uid_t user, gid_t group) {
  std::string at = to_change(file);
  return int(at.empty() ? sys(SYS_fchown, file, user, group)
                        : sys(SYS_fchownat, AT_FDCWD, at.c_str(), user, group, 0));
}

REPLACES(int, utimensat, int folder, const char* path, const struct timespec* times, int flags) {
  return times_in(folder, path, times, flags);
}

REPLACES(int, futimens, int file, const struct timespec* times) {
  return times_in(file, nullptr, times, 0);
}

REPLACES(int, utimes, const char* path, const struct timeval* times) {
  return utimes_in(AT_FDCWD, path, times, 0);
}

REPLACES(int, lutimes, const char* path, const struct timeval* times) {
  return utimes_in(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW);
}

REPLACES(int, futimes, int file, const struct timeval* times) {
  return utimes_in(file, nullptr, times, 0);
}

REPLACES(int, futimesat, int folder, const char* path, const struct timeval* times) {
  return utimes_in(folder, path, times, 0);
}

REPLACES(int, utime, const char* path, const struct utimbuf* times) {
  struct timespec exact[2] = {};
  if (times != nullptr) {
    exact[0].tv_sec = times->actime;
    exact[1].tv_sec = times->modtime;
  }
  return times_in(AT_FDCWD, path, times == nullptr ? nullptr : exact, 0);
}

#define READS_ATTRIBUTE(name, follow)                                                          \
  REPLACES(ssize_t, name, const char* path, const char* attribute, void* value, size_t size) { \
    return read_at(path, follow, [&](const char* at) {                                         \
      return sys(SYS_##name, at, attribute, value, size);                                      \
    });                                                                                        \
  }
#define LISTS_ATTRIBUTES(name, follow)                                                             \
  REPLACES(ssize_t, name, const char* path, char* list, size_t size) {                             \
    return read_at(path, follow, [&](const char* at) { return sys(SYS_##name, at, list, size); }); \
  }
READS_ATTRIBUTE(getxattr, true)
READS_ATTRIBUTE(lgetxattr, false)
LISTS_ATTRIBUTES(listxattr, true)
LISTS_ATTRIBUTES(llistxattr, false)

REPLACES(
    int, setxattr, const char* path, const char* name, const void* value, size_t size, int flags) {
  if (!is_on()) {
    return int(sys(SYS_setxattr, path, name, value, size, flags));
  }
  return change(AT_FDCWD, path, true, [&](const char* at) {
    return sys(SYS_setxattr, at, name, value, size, flags);
  });
}

REPLACES(
    int, lsetxattr, const char* path, const char* name, const void* value, size_t size, int flags) {
  if (!is_on()) {
    return int(sys(SYS_lsetxattr, path, name, value, size, flags));
  }
  return change(AT_FDCWD, path, false, [&](const char* at) {
    return sys(SYS_lsetxattr, at, name, value, size, flags);
  });
}

REPLACES(int, fsetxattr, int file, const char* name, const void* value, size_t size, int flags) {
  std::string at = to_change(file);
  return int(at.empty() ? sys(SYS_fsetxattr, file, name, value, size, flags)
                        : sys(SYS_setxattr, at.c_str(), name, value, size, flags));
}

REPLACES(int, removexattr, const char* path, const char* name) {
  if (!is_on()) {
    return int(sys(SYS_removexattr, path, name));
  }
  return change(
      AT_FDCWD, path, true, [&](const char* at) { return sys(SYS_removexattr, at, name); });
}
