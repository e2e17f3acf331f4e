// Calls that name a path.

#include "paths.h"

#include "calls.h"
#include "system.h"
#include "tree.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pytracer::view {

int open_in(int folder, const char* path, int flags, mode_t mode) {
  if (!is_on()) {
    return int(sys(SYS_openat, folder, path, flags, mode));
  }
  bool makes = (flags & O_CREAT) && (flags & O_EXCL);
  Place place = locate(folder, path, !(flags & O_NOFOLLOW) && !makes);
  if (!prepare(place, flags)) {
    return -1;
  }
  return int(sys(SYS_openat, AT_FDCWD, place.at().c_str(), flags, mode));
}

namespace {

int failed(int error) {
  errno = error;
  return -1;
}

int stat_in(int folder, const char* path, void* status, int flags) {
  bool is_descriptor = (flags & AT_EMPTY_PATH) && path != nullptr && *path == 0;
  if (!is_on() || is_descriptor) {
    return int(sys(SYS_newfstatat, folder, path, status, flags));
  }
  Place place = locate(folder, path, !(flags & AT_SYMLINK_NOFOLLOW));
  return place.exists() ? int(sys(SYS_newfstatat, AT_FDCWD, place.at().c_str(), status, flags))
                        : failed(place.error);
}

int ask_access(int folder, const char* path, int mode, int flags) {
  constexpr long kFaccessat2 = 439;  // since Linux 5.8
  long done = flags == 0 ? -1 : sys(kFaccessat2, folder, path, mode, flags);
  return int(flags == 0 || (done != 0 && errno == ENOSYS) ? sys(SYS_faccessat, folder, path, mode)
                                                          : done);
}

int access_in(int folder, const char* path, int mode, int flags) {
  if (!is_on()) {
    return ask_access(folder, path, mode, flags);
  }
  Place place = locate(folder, path, !(flags & AT_SYMLINK_NOFOLLOW));
  return place.exists() ? ask_access(AT_FDCWD, place.at().c_str(), mode, flags)
                        : failed(place.error);
}

template <typename Make>
int make(int folder, const char* path, Make&& what) {
  Place place = locate(folder, path, false);
  if (place.exists()) {
    return failed(EEXIST);
  }
  if (place.path.empty()) {
    return failed(place.error);
  }
  return make_room(place) ? int(what(place.mine().c_str())) : -1;
}

int mknod_in(int folder, const char* path, mode_t mode, dev_t device) {
  if (!is_on()) {
    return int(sys(SYS_mknodat, folder, path, mode, device));
  }
  return make(
      folder, path, [&](const char* at) { return sys(SYS_mknodat, AT_FDCWD, at, mode, device); });
}

ssize_t readlink_in(int folder, const char* path, char* target, size_t size) {
  if (!is_on() || path == nullptr || *path == 0) {
    return sys(SYS_readlinkat, folder, path, target, size);
  }
  Place place = locate(folder, path, false);
  if (!place.exists()) {
    return failed(place.error);
  }
  char whole[PATH_MAX];
  long got = sys(SYS_readlinkat, AT_FDCWD, place.at().c_str(), whole, sizeof whole);
  if (got < 0) {
    return -1;
  }
  std::string text = shown(std::string(whole, size_t(got)));
  size_t count = std::min(size, text.size());
  std::memcpy(target, text.data(), count);
  return ssize_t(count);
}

char* resolve(const char* path, char* into) {
  Place place = locate(AT_FDCWD, path, true);
  if (!place.exists()) {
    errno = path == nullptr ? EINVAL : place.error;
    return nullptr;
  }
  if (into == nullptr) {
    return strdup(place.path.c_str());
  }
  return std::strncpy(into, place.path.c_str(), PATH_MAX);
}

// Replaces the XXXXXX of a template until `what` makes something new.
template <typename Make>
int make_unlike(char* name, int suffix, Make&& what) {
  constexpr char kLetters[] = "abcdefghijklmnopqrstuvwxyz0123456789";
  long size = long(std::strlen(name)) - suffix - 6;
  if (size < 0 || std::strncmp(name + size, "XXXXXX", 6) != 0) {
    return failed(EINVAL);
  }
  for (int attempt = 0; attempt < 1000; attempt++) {
    unsigned char random[6];
    sys(SYS_getrandom, random, sizeof random, 0);
    for (int i = 0; i < 6; i++) {
      name[size + i] = kLetters[random[i] % 36];
    }
    int made = what();
    if (made >= 0 || errno != EEXIST) {
      return made;
    }
  }
  return -1;
}

int temporary(char* name, int suffix, int flags) {
  return make_unlike(name, suffix, [&] {
    return open_in(AT_FDCWD, name, (flags & ~O_ACCMODE) | O_RDWR | O_CREAT | O_EXCL, 0600);
  });
}

int flags_of(const char* mode) {
  int flags = *mode == 'r' ? O_RDONLY : O_WRONLY | O_CREAT | (*mode == 'w' ? O_TRUNC : O_APPEND);
  return std::strchr(mode, '+') ? (flags & ~O_ACCMODE) | O_RDWR : flags;
}

template <typename Open>
FILE* open_stream(const char* path, const char* mode, Open&& how) {
  if (!is_on()) {
    return how(path);
  }
  Place place = locate(AT_FDCWD, path, true);
  return prepare(place, flags_of(mode)) ? how(place.at().c_str()) : nullptr;
}

}  // namespace

int truncate_in(const char* path, off_t size) {
  if (!is_on()) {
    return int(sys(SYS_truncate, path, size));
  }
  Place place = locate(AT_FDCWD, path, true);
  if (!prepare(place, O_WRONLY)) {
    return -1;
  }
  return int(sys(SYS_truncate, place.at().c_str(), size));
}

int unlink_in(int folder, const char* path, bool is_folder) {
  if (!is_on()) {
    return int(sys(SYS_unlinkat, folder, path, is_folder ? AT_REMOVEDIR : 0));
  }
  return remove(folder, path, is_folder);
}

int mkdir_in(int folder, const char* path, mode_t mode) {
  return is_on() ? make_folder(folder, path, mode) : int(sys(SYS_mkdirat, folder, path, mode));
}

int rename_in(int from, const char* old, int to, const char* made, unsigned flags) {
  if (is_on()) {
    return rename(from, old, to, made, flags);
  }
  int done = int(sys(SYS_renameat2, from, old, to, made, flags));
  return done != 0 && errno == EXDEV && is_of_overlays()
             ? move_by_copy(whole(from, old), whole(to, made))
             : done;
}

int symlink_in(const char* target, int folder, const char* path) {
  if (!is_on()) {
    return int(sys(SYS_symlinkat, target, folder, path));
  }
  return make(
      folder, path, [&](const char* at) { return sys(SYS_symlinkat, target, AT_FDCWD, at); });
}

int link_in(int from, const char* old, int to, const char* made, int flags) {
  if (!is_on() || (flags & AT_EMPTY_PATH)) {
    return int(sys(SYS_linkat, from, old, to, made, flags));
  }
  Place source = locate(from, old, flags & AT_SYMLINK_FOLLOW);
  if (!source.exists()) {
    return failed(source.error);
  }
  Place target = locate(to, made, false);
  if (target.exists() || target.path.empty()) {
    return failed(target.exists() ? EEXIST : target.error);
  }
  if (source.is_folder()) {
    return failed(EPERM);
  }
  if (!bring(source)) {
    return -1;
  }
  return make(to, made, [&](const char* at) {
    return sys(SYS_linkat, AT_FDCWD, source.at().c_str(), AT_FDCWD, at, flags);
  });
}

}  // namespace pytracer::view

using namespace pytracer::view;

#define MODE_OF(flags)                     \
  mode_t mode = 0;                         \
  if ((flags) & (O_CREAT | __O_TMPFILE)) { \
    va_list rest;                          \
    va_start(rest, flags);                 \
    mode = mode_t(va_arg(rest, int));      \
    va_end(rest);                          \
  }

#define OPENS(name)                                       \
  REPLACES(int, name, const char* path, int flags, ...) { \
    MODE_OF(flags)                                        \
    return open_in(AT_FDCWD, path, flags, mode);          \
  }
#define OPENS_IN(name)                                                \
  REPLACES(int, name, int folder, const char* path, int flags, ...) { \
    MODE_OF(flags)                                                    \
    return open_in(folder, path, flags, mode);                        \
  }
OPENS(open)
OPENS(open64)
OPENS_IN(openat)
OPENS_IN(openat64)
#define OPENS_CHECKED(name)                          \
  REPLACES(int, name, const char* path, int flags) { \
    return open_in(AT_FDCWD, path, flags, 0);        \
  }
#define OPENS_IN_CHECKED(name)                                   \
  REPLACES(int, name, int folder, const char* path, int flags) { \
    return open_in(folder, path, flags, 0);                      \
  }
OPENS_CHECKED(__open_2)
OPENS_CHECKED(__open64_2)
OPENS_IN_CHECKED(__openat_2)
OPENS_IN_CHECKED(__openat64_2)
#define CREATES(name)                                                   \
  REPLACES(int, name, const char* path, mode_t mode) {                  \
    return open_in(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode); \
  }
CREATES(creat)
CREATES(creat64)

#define OPENS_STREAM(name)                                                           \
  REPLACES(FILE*, name, const char* path, const char* mode) {                        \
    auto real = reinterpret_cast<FILE* (*)(const char*, const char*)>(libcs(#name)); \
    return open_stream(path, mode, [&](const char* at) { return real(at, mode); });  \
  }
#define OPENS_STREAM_AGAIN(name)                                                            \
  REPLACES(FILE*, name, const char* path, const char* mode, FILE* stream) {                 \
    auto real = reinterpret_cast<FILE* (*)(const char*, const char*, FILE*)>(libcs(#name)); \
    if (path == nullptr) {                                                                  \
      return real(path, mode, stream);                                                      \
    }                                                                                       \
    return open_stream(path, mode, [&](const char* at) { return real(at, mode, stream); }); \
  }
OPENS_STREAM(fopen)
OPENS_STREAM(fopen64)
OPENS_STREAM_AGAIN(freopen)
OPENS_STREAM_AGAIN(freopen64)

#define TEMPORARY(name, suffix, flags, ...)     \
  REPLACES(int, name, char* path __VA_ARGS__) { \
    return temporary(path, suffix, flags);      \
  }
#define COMMA ,
TEMPORARY(mkstemp, 0, 0)
TEMPORARY(mkstemp64, 0, 0)
TEMPORARY(mkostemp, 0, flags, COMMA int flags)
TEMPORARY(mkostemp64, 0, flags, COMMA int flags)
TEMPORARY(mkstemps, suffix, 0, COMMA int suffix)
TEMPORARY(mkstemps64, suffix, 0, COMMA int suffix)
TEMPORARY(mkostemps, suffix, flags, COMMA int suffix COMMA int flags)
TEMPORARY(mkostemps64, suffix, flags, COMMA int suffix COMMA int flags)

REPLACES(char*, mkdtemp, char* path) {
  return make_unlike(path, 0, [&] { return mkdir_in(AT_FDCWD, path, 0700); }) < 0 ? nullptr : path;
}

#define TEMPORARY_STREAM(name)                                                               \
  REPLACES(FILE*, name, void) {                                                              \
    char path[] = "/tmp/pytracer-XXXXXX";                                                    \
    int file = temporary(path, 0, O_CLOEXEC);                                                \
    return file < 0 || unlink_in(AT_FDCWD, path, false) != 0 ? nullptr : fdopen(file, "w+"); \
  }
TEMPORARY_STREAM(tmpfile)
TEMPORARY_STREAM(tmpfile64)

#define STATS(suffix)                                                                             \
  REPLACES(int, stat##suffix, const char* path, void* status) {                                   \
    return stat_in(AT_FDCWD, path, status, 0);                                                    \
  }                                                                                               \
  REPLACES(int, lstat##suffix, const char* path, void* status) {                                  \
    return stat_in(AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW);                                  \
  }                                                                                               \
  REPLACES(int, fstatat##suffix, int folder, const char* path, void* status, int flags) {         \
    return stat_in(folder, path, status, flags);                                                  \
  }                                                                                               \
  REPLACES(int, __xstat##suffix, int, const char* path, void* status) {                           \
    return stat_in(AT_FDCWD, path, status, 0);                                                    \
  }                                                                                               \
  REPLACES(int, __lxstat##suffix, int, const char* path, void* status) {                          \
    return stat_in(AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW);                                  \
  }                                                                                               \
  REPLACES(int, __fxstatat##suffix, int, int folder, const char* path, void* status, int flags) { \
    return stat_in(folder, path, status, flags);                                                  \
  }
STATS()
STATS(64)

REPLACES(int, statx, int folder, const char* path, int flags, unsigned mask, void* status) {
  if (!is_on() || path == nullptr || *path == 0) {
    return int(sys(SYS_statx, folder, path, flags, mask, status));
  }
  Place place = locate(folder, path, !(flags & AT_SYMLINK_NOFOLLOW));
  return place.exists() ? int(sys(SYS_statx, AT_FDCWD, place.at().c_str(), flags, mask, status))
                        : failed(place.error);
}

#define OF_FILE_SYSTEM(name)                                                                    \
  REPLACES(int, name, const char* path, void* status) {                                         \
    auto real = reinterpret_cast<int (*)(const char*, void*)>(libcs(#name));                    \
    Place place;                                                                                \
    return real(                                                                                \
        is_on() && (place = locate(AT_FDCWD, path, true)).exists() ? place.at().c_str() : path, \
        status);                                                                                \
  }
OF_FILE_SYSTEM(statfs)
OF_FILE_SYSTEM(statfs64)
OF_FILE_SYSTEM(statvfs)
OF_FILE_SYSTEM(statvfs64)

REPLACES(int, access, const char* path, int mode) {
  return access_in(AT_FDCWD, path, mode, 0);
}

REPLACES(int, euidaccess, const char* path, int mode) {
  return access_in(AT_FDCWD, path, mode, AT_EACCESS);
}

REPLACES(int, eaccess, const char* path, int mode) {
  return access_in(AT_FDCWD, path, mode, AT_EACCESS);
}

REPLACES(int, faccessat, int folder, const char* path, int mode, int flags) {
  return access_in(folder, path, mode, flags);
}

REPLACES(ssize_t, readlink, const char* path, char* target, size_t size) {
  return readlink_in(AT_FDCWD, path, target, size);
}

REPLACES(ssize_t, readlinkat, int folder, const char* path, char* target, size_t size) {
  return readlink_in(folder, path, target, size);
}

REPLACES(char*, realpath, const char* path, char* into) {
  using Real = char* (*)(const char*, char*);
  return is_on() ? resolve(path, into) : reinterpret_cast<Real>(libcs("realpath"))(path, into);
}

REPLACES(char*, __realpath_chk, const char* path, char* into, size_t) {
  return view_realpath(path, into);
}

REPLACES(char*, canonicalize_file_name, const char* path) {
  return view_realpath(path, nullptr);
}

REPLACES(int, unlink, const char* path) {
  return unlink_in(AT_FDCWD, path, false);
}

REPLACES(int, rmdir, const char* path) {
  return unlink_in(AT_FDCWD, path, true);
}

REPLACES(int, unlinkat, int folder, const char* path, int flags) {
  return unlink_in(folder, path, flags & AT_REMOVEDIR);
}

REPLACES(int, remove, const char* path) {
  struct stat status;
  int done = stat_in(AT_FDCWD, path, &status, AT_SYMLINK_NOFOLLOW);
  return done != 0 ? done : unlink_in(AT_FDCWD, path, S_ISDIR(status.st_mode));
}

REPLACES(int, rename, const char* from, const char* to) {
  return rename_in(AT_FDCWD, from, AT_FDCWD, to, 0);
}

REPLACES(int, renameat, int from, const char* old, int to, const char* made) {
  return rename_in(from, old, to, made, 0);
}

REPLACES(int, renameat2, int from, const char* old, int to, const char* made, unsigned flags) {
  return rename_in(from, old, to, made, flags);
}

REPLACES(int, mkdir, const char* path, mode_t mode) {
  return mkdir_in(AT_FDCWD, path, mode);
}

REPLACES(int, mkdirat, int folder, const char* path, mode_t mode) {
  return mkdir_in(folder, path, mode);
}

REPLACES(int, symlink, const char* target, const char* path) {
  return symlink_in(target, AT_FDCWD, path);
}

REPLACES(int, symlinkat, const char* target, int folder, const char* path) {
  return symlink_in(target, folder, path);
}

REPLACES(int, link, const char* old, const char* made) {
  return link_in(AT_FDCWD, old, AT_FDCWD, made, 0);
}

REPLACES(int, linkat, int from, const char* old, int to, const char* made, int flags) {
  return link_in(from, old, to, made, flags);
}

REPLACES(int, mkfifo, const char* path, mode_t mode) {
  return mknod_in(AT_FDCWD, path, mode | S_IFIFO, 0);
}

REPLACES(int, mkfifoat, int folder, const char* path, mode_t mode) {
  return mknod_in(folder, path, mode | S_IFIFO, 0);
}

REPLACES(int, mknod, const char* path, mode_t mode, dev_t device) {
  return mknod_in(AT_FDCWD, path, mode, device);
}

REPLACES(int, mknodat, int folder, const char* path, mode_t mode, dev_t device) {
  return mknod_in(folder, path, mode, device);
}

REPLACES(int, truncate, const char* path, off_t size) {
  return truncate_in(path, size);
}

REPLACES(int, truncate64, const char* path, off_t size) {
  return truncate_in(path, size);
}
