// What changes the view: private versions of files, and marks of what is removed.

#include "system.h"
#include "tree.h"

#include <set>

namespace pytracer::view {

namespace {

// Removes a folder with what is in it. A private one that looks empty has marks.
void sweep(const std::string& path) {
  std::vector<std::string> found;
  struct stat status;
  if (lstat_of(path, &status) == 0 && S_ISDIR(status.st_mode) && list(path, found)) {
    for (const std::string& name : found) {
      sweep(path + "/" + name);
    }
    sys(SYS_unlinkat, AT_FDCWD, path.c_str(), AT_REMOVEDIR);
  } else {
    sys(SYS_unlinkat, AT_FDCWD, path.c_str(), 0);
  }
}

bool copy_bytes(int from, int to) {
  char buffer[1 << 16];
  for (;;) {
    long size = sys(SYS_copy_file_range, from, nullptr, to, nullptr, size_t{1} << 30, 0u);
    if (size > 0) {
      continue;
    }
    if (size == 0) {
      return true;
    }
    size = sys(SYS_read, from, buffer, sizeof buffer);
    if (size <= 0) {
      return size == 0;
    }
    for (long done = 0; done < size;) {
      long written = sys(SYS_write, to, buffer + done, size_t(size - done));
      if (written < 0) {
        return false;
      }
      done += written;
    }
  }
}

bool copy_file(const std::string& real, const std::string& mine, const struct stat& status) {
  std::string copy = parent_of(mine) + "/" + kPrefix + std::to_string(sys(SYS_gettid));
  int from = int(sys(SYS_openat, AT_FDCWD, real.c_str(), O_RDONLY | O_CLOEXEC));
  if (from < 0) {
    return false;
  }
  int to = int(sys(SYS_openat,
                   AT_FDCWD,
                   copy.c_str(),
                   O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC,
                   status.st_mode & 07777));
  bool well = to >= 0 && copy_bytes(from, to);
  if (well) {
    sys(SYS_fchmod, to, status.st_mode & 07777);
    struct timespec times[2] = {status.st_atim, status.st_mtim};
    sys(SYS_utimensat, to, nullptr, times, 0);
  }
  int error = errno;
  sys(SYS_close, from);
  sys(SYS_close, to);
  errno = error;
  return well && sys(SYS_renameat2, AT_FDCWD, copy.c_str(), AT_FDCWD, mine.c_str(), 0u) == 0;
}

// Gives all folders above the path a private version, with the real one's mode and time.
bool bring_parents(const std::string& path) {
  std::string parent = parent_of(path);
  std::string mine = tree_at(parent);
  struct stat status;
  if (parent == "/") {
    return true;
  }
  if (lstat_of(mine, &status) == 0) {
    if (sys(SYS_faccessat, AT_FDCWD, mine.c_str(), W_OK | X_OK) != 0) {
      sys(SYS_fchmodat, AT_FDCWD, mine.c_str(), (status.st_mode & 07777) | 0700);
    }
    return true;
  }
  if (!bring_parents(parent) || lstat_of(parent, &status) != 0) {
    return false;
  }
  struct stat above;
  lstat_of(parent_of(mine), &above);
  if (sys(SYS_mkdirat, AT_FDCWD, mine.c_str(), 0700) != 0 && errno != EEXIST) {
    return false;
  }
  sys(SYS_fchmodat, AT_FDCWD, mine.c_str(), (status.st_mode & 07777) | 0700);
  copy_times(mine, status);
  copy_times(parent_of(mine), above);
  return true;
}

// Whether the program may add and remove names in the path's folder. A private folder belongs to
// the user, so where the real one is somebody else's, that one decides.
bool may_change_parent(const Place& place) {
  std::string real = parent_of(place.path), mine = tree_at(real);
  struct stat status;
  bool is_others = lstat_of(real, &status) == 0 && status.st_uid != geteuid() && geteuid() != 0;
  bool is_private = is_there(mine) && (!is_others || is_there(mine + "/" + kOpaque));
  return sys(SYS_faccessat, AT_FDCWD, (is_private ? mine : real).c_str(), W_OK | X_OK) == 0;
}

bool mark_gone(const Place& place) {
  if (!place.hides_real) {
    return true;
  }
  return bring_parents(place.path) &&
         (sys(SYS_symlinkat, kGone, AT_FDCWD, place.mine().c_str()) == 0 || errno == EEXIST);
}

bool mark_opaque(const std::string& mine) {
  int file = int(sys(
      SYS_openat, AT_FDCWD, (mine + "/" + kOpaque).c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  return file >= 0 && sys(SYS_close, file) == 0;
}

// Whether a path ends with . or .., which cannot be renamed or removed.
bool is_no_name(std::string_view path) {
  while (path.size() > 1 && path.back() == '/') {
    path.remove_suffix(1);
  }
  std::string_view last = path.substr(path.rfind('/') + 1);
  return last == "." || last == "..";
}

// Copies all that a path has, for a folder that the system does not rename.
bool copy_tree(const std::string& from, const std::string& to) {
  struct stat status;
  if (lstat_of(from, &status) != 0) {
    return false;
  }
  bool well = false;
  if (S_ISDIR(status.st_mode)) {
    std::vector<std::string> found;
    well = sys(SYS_mkdirat, AT_FDCWD, to.c_str(), 0700) == 0 && list(from, found);
    for (const std::string& name : found) {
      well = well && copy_tree(from + "/" + name, to + "/" + name);
    }
    sys(SYS_fchmodat, AT_FDCWD, to.c_str(), status.st_mode & 07777);
  } else if (S_ISLNK(status.st_mode)) {
    well = sys(SYS_symlinkat, link_of(from).c_str(), AT_FDCWD, to.c_str()) == 0;
  } else if (S_ISREG(status.st_mode)) {
    well = copy_file(from, to, status);
  } else {
    well = sys(SYS_mknodat, AT_FDCWD, to.c_str(), status.st_mode, status.st_rdev) == 0;
  }
  if (well) {
    copy_times(to, status);
  }
  return well;
}

}  // namespace

int move_by_copy(const std::string& from, const std::string& to) {
  struct stat status;
  if (lstat_of(from, &status) != 0 || !S_ISDIR(status.st_mode) || is_below(to, from)) {
    errno = EXDEV;
    return -1;
  }
  if (is_there(to) && sys(SYS_unlinkat, AT_FDCWD, to.c_str(), AT_REMOVEDIR) != 0) {
    return -1;
  }
  if (!copy_tree(from, to)) {
    int error = errno;
    sweep(to);
    errno = error;
    return -1;
  }
  sweep(from);
  return 0;
}

bool make_room(Place& place) {
  if (!place.is_covered) {
    return true;
  }
  if (!may_change_parent(place) || !bring_parents(place.path)) {
    return false;
  }
  if (place.is_removed) {
    sys(SYS_unlinkat, AT_FDCWD, place.mine().c_str(), 0);
  }
  return true;
}

bool bring(Place& place, bool whole) {
  if (!place.exists()) {
    return fail(place.error);
  }
  if (!place.is_covered || (place.kind == Place::kMine && !whole)) {
    return true;
  }
  std::string mine = place.mine();
  if (place.kind == Place::kReal) {
    if (!bring_parents(place.path)) {
      return false;
    }
    struct stat above;
    lstat_of(parent_of(mine), &above);
    bool well;
    if (S_ISDIR(place.status.st_mode)) {
      well = sys(SYS_mkdirat, AT_FDCWD, mine.c_str(), 0700) == 0 || errno == EEXIST;
      sys(SYS_fchmodat, AT_FDCWD, mine.c_str(), place.status.st_mode & 07777);
      copy_times(mine, place.status);
    } else if (S_ISLNK(place.status.st_mode)) {
      std::string target = link_of(place.path);
      well = sys(SYS_symlinkat, target.c_str(), AT_FDCWD, mine.c_str()) == 0;
      copy_times(mine, place.status);
    } else if (S_ISREG(place.status.st_mode)) {
      well = copy_file(place.path, mine, place.status);
    } else {
      return fail(EPERM);  // a pipe, a socket or a device
    }
    if (!well) {
      return false;
    }
    copy_times(parent_of(mine), above);
    place.kind = Place::kMine;
  }
  if (whole && S_ISDIR(place.status.st_mode)) {
    for (const std::string& name : names(place)) {
      Place inside = locate(AT_FDCWD, (place.path + "/" + name).c_str(), false);
      if (!bring(inside, true)) {
        return false;
      }
    }
    copy_times(mine, place.status);
  }
  return true;
}

bool prepare(Place& place, int flags) {
  bool writes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC) != 0;
  if (place.error != 0 && (place.error != ENOENT || (flags & O_CREAT) == 0)) {
    return fail(place.error);
  }
  if (!place.is_covered || (flags & O_PATH) == O_PATH) {
    return true;
  }
  if (!place.exists()) {
    if (place.path.empty()) {
      return fail(ENOENT);
    }
    if (!make_room(place)) {
      return false;
    }
    place.kind = Place::kMine;
    return true;
  }
  if ((flags & O_TMPFILE) == O_TMPFILE) {
    return bring(place);
  }
  if (place.kind == Place::kMine || !writes || !S_ISREG(place.status.st_mode) ||
      ((flags & O_CREAT) && (flags & O_EXCL))) {
    return true;
  }
  if (sys(SYS_faccessat, AT_FDCWD, place.path.c_str(), W_OK) != 0) {
    return false;
  }
  return bring(place);
}

std::vector<std::string> names(const Place& folder) {
  std::set<std::string> found;
  std::vector<std::string> mine, real;
  bool is_mine = (folder.kind == Place::kMine || folder.path == "/") && folder.is_covered;
  bool is_opaque = false;
  std::set<std::string> gone;
  if (is_mine) {
    list(folder.mine(), mine);
    for (const std::string& name : mine) {
      if (name.rfind(kPrefix, 0) == 0) {
        is_opaque = is_opaque || name == kOpaque;
      } else if (link_of(folder.mine() + "/" + name) == kGone) {
        gone.insert(name);
      } else {
        found.insert(name);
      }
    }
  }
  if (!is_opaque && (folder.hides_real || !is_mine)) {
    list(folder.path, real);
    for (const std::string& name : real) {
      if (gone.count(name) == 0) {
        found.insert(name);
      }
    }
  }
  return {found.begin(), found.end()};
}

int remove(int folder, const char* path, bool is_folder) {
  Place place = locate(folder, path, false);
  if (!place.exists()) {
    errno = place.error;
    return -1;
  }
  if (!place.is_covered) {
    return int(sys(SYS_unlinkat, AT_FDCWD, place.path.c_str(), is_folder ? AT_REMOVEDIR : 0));
  }
  if (is_folder != place.is_folder()) {
    errno = is_folder ? ENOTDIR : EISDIR;
    return -1;
  }
  if (is_folder && (is_no_name(path) || !names(place).empty())) {
    bool is_itself = is_no_name(path) && std::string_view(path).substr(0, 2) != "..";
    errno = is_itself ? EINVAL : ENOTEMPTY;
    return -1;
  }
  if (!may_change_parent(place)) {
    return -1;
  }
  if (place.kind == Place::kMine) {
    sweep(place.mine());
  }
  return mark_gone(place) ? 0 : -1;
}

int make_folder(int folder, const char* path, mode_t mode) {
  std::string text = path == nullptr ? "" : path;
  while (text.size() > 1 && text.back() == '/') {
    text.pop_back();
  }
  Place place = locate(folder, text.c_str(), false);
  if (place.exists() || place.error != ENOENT || place.path.empty()) {
    errno = place.exists() ? EEXIST : place.error;
    return -1;
  }
  bool was_removed = place.is_removed;
  if (!make_room(place) || sys(SYS_mkdirat, AT_FDCWD, place.mine().c_str(), mode) != 0) {
    return -1;
  }
  return !was_removed || mark_opaque(place.mine()) ? 0 : -1;
}

int rename(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  Place source = locate(from_folder, from, false);
  Place target = locate(to_folder, to, false);
  auto refuse = [](int error) {
    errno = error;
    return -1;
  };
  // In the kernel's order, so that the errors are the same.
  for (const Place* place : {&source, &target}) {
    if (!place->exists() && place->path.empty()) {
      return refuse(place->error);
    }
  }
  if (is_no_name(from) || is_no_name(to)) {
    return refuse(EBUSY);
  }
  if (!source.exists()) {
    return refuse(source.error);
  }
  if (!source.is_covered || !target.is_covered) {
    return source.is_covered != target.is_covered
               ? refuse(EXDEV)
               : int(sys(SYS_renameat2, from_folder, from, to_folder, to, flags));
  }
  constexpr unsigned kNoReplace = 1;
  if ((flags & ~kNoReplace) != 0) {
    return refuse(EINVAL);
  }
  if (target.exists() && (flags & kNoReplace)) {
    return refuse(EEXIST);
  }
  if (source.path == target.path) {
    return 0;
  }
  if (source.is_folder() && is_below(target.path, source.path)) {
    return refuse(EINVAL);
  }
  if (is_below(source.path, target.path)) {
    return refuse(ENOTEMPTY);
  }
  if (target.exists()) {
    if (source.is_folder() != target.is_folder()) {
      return refuse(source.is_folder() ? ENOTDIR : EISDIR);
    }
    if (source.status.st_ino == target.status.st_ino &&
        source.status.st_dev == target.status.st_dev) {
      return 0;
    }
  }
  if (target.is_folder() && !names(target).empty()) {
    return refuse(ENOTEMPTY);
  }
  if (!may_change_parent(source) || !may_change_parent(target) || !bring(source, true) ||
      !bring_parents(target.path)) {
    return -1;
  }
  if (target.is_removed || (target.kind == Place::kMine && target.is_folder())) {
    sweep(target.mine());
  }
  std::string old = source.mine(), made = target.mine();
  if (sys(SYS_renameat2, AT_FDCWD, old.c_str(), AT_FDCWD, made.c_str(), 0u) != 0) {
    return -1;
  }
  if (source.is_folder()) {
    struct stat status;
    lstat_of(made, &status);
    mark_opaque(made);
    copy_times(made, status);
  }
  return mark_gone(source) ? 0 : -1;
}

}  // namespace pytracer::view
