// What the view asks of the system, past the calls that it replaces.

#pragma once

#include <cerrno>
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

namespace pytracer::view {

// In the place of the last argument, which none of the calls that are trapped has. See traps.cpp.
constexpr long kOurs = 0x7079747261636572;

template <typename... Arguments>
long sys(long number, Arguments... arguments) {
  if constexpr (sizeof...(arguments) >= 6) {
    return syscall(number, arguments...);
  } else if constexpr (sizeof...(arguments) == 5) {
    return syscall(number, arguments..., kOurs);
  } else {
    return sys(number, arguments..., 0L);
  }
}

inline bool fail(int error) {
  errno = error;
  return false;
}

inline int lstat_of(const std::string& path, struct stat* status) {
  return int(sys(SYS_newfstatat, AT_FDCWD, path.c_str(), status, AT_SYMLINK_NOFOLLOW));
}

inline bool is_there(const std::string& path) {
  struct stat status;
  return lstat_of(path, &status) == 0;
}

inline std::string link_of(const std::string& path) {
  char target[PATH_MAX];
  long size = sys(SYS_readlinkat, AT_FDCWD, path.c_str(), target, sizeof target);
  return size < 0 ? std::string() : std::string(target, size_t(size));
}

inline bool is_below(std::string_view path, std::string_view folder) {
  return path.substr(0, folder.size()) == folder &&
         (path.size() == folder.size() || path[folder.size()] == '/');
}

inline std::string parent_of(const std::string& path) {
  size_t slash = path.rfind('/');
  return slash == 0 || slash == std::string::npos ? "/" : path.substr(0, slash);
}

inline void copy_times(const std::string& path, const struct stat& from) {
  struct timespec times[2] = {from.st_atim, from.st_mtim};
  sys(SYS_utimensat, AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW);
}

// The entries of one folder of the system's.
inline bool list(const std::string& path, std::vector<std::string>& found) {
  int folder = int(sys(SYS_openat, AT_FDCWD, path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder < 0) {
    return false;
  }
  alignas(dirent64) char buffer[16384];
  long size;
  while ((size = sys(SYS_getdents64, folder, buffer, sizeof buffer)) > 0) {
    for (long at = 0; at < size;) {
      auto* entry = reinterpret_cast<dirent64*>(buffer + at);
      std::string_view name = entry->d_name;
      if (name != "." && name != "..") {
        found.emplace_back(name);
      }
      at += entry->d_reclen;
    }
  }
  sys(SYS_close, folder);
  return size == 0;
}

}  // namespace pytracer::view
