#pragma once

#include <ctime>
#include <sys/types.h>

namespace pytracer::view {

// Opens a file as `openat` does, in the view.
int open_in(int folder, const char* path, int flags, mode_t mode);

// The other calls that change files, as their namesakes in libc.
int rename_in(int from, const char* old, int to, const char* made, unsigned flags);
int unlink_in(int folder, const char* path, bool is_folder);
int mkdir_in(int folder, const char* path, mode_t mode);
int symlink_in(const char* target, int folder, const char* path);
int truncate_in(const char* path, off_t size);
int chmod_in(int folder, const char* path, mode_t mode);
int chown_in(int folder, const char* path, uid_t user, gid_t group, int flags);
int times_in(int folder, const char* path, const struct timespec* times, int flags);
int link_in(int from, const char* old, int to, const char* made, int flags);

}  // namespace pytracer::view
