#include "tree.h"

#include "system.h"

#include <atomic>
#include <cstdlib>
#include <set>

namespace pytracer::view {

namespace {

constexpr int kMostLinks = 40;

struct State {
  std::string tree;                    // of the private versions
  std::vector<std::string> uncovered;  // folders
  std::set<pid_t> others;              // threads that were there before, and are not the program's
  bool network = false;
};

std::atomic<State*> state{nullptr};
std::atomic<int> generation{0};
bool is_started = false;
bool has_overlays = false;  // set before the program's first line

bool is_covered(const std::string& path) {
  if (is_below(path, "/dev")) {
    return is_below(path, "/dev/shm");
  }
  if (is_below(path, "/proc") || is_below(path, "/sys")) {
    return false;
  }
  for (const std::string& folder : state.load()->uncovered) {
    if (is_below(path, folder)) {
      return false;
    }
  }
  return true;
}

// The folder that a descriptor is, or the working directory, as the program knows it.
bool folder_of(int descriptor, std::string& path) {
  char buffer[PATH_MAX];
  if (descriptor == AT_FDCWD) {
    if (sys(SYS_getcwd, buffer, sizeof buffer) < 0) {
      return false;
    }
    path = shown(buffer);
    return true;
  }
  path = link_of("/proc/self/fd/" + std::to_string(descriptor));
  if (path.empty() || path[0] != '/') {
    return fail(path.empty() ? EBADF : ENOTDIR);
  }
  path = shown(path);
  return true;
}

// A folder on the way to a path.
struct Step {
  bool is_mine;  // it has a private version
  bool is_real;  // the real one is seen
};

}  // namespace

void begin(const char* folder, const char* open, bool network) {
  auto* made = new State;  // kept for good: a thread may be using it
  char whole[PATH_MAX];
  std::string root = folder;
  long size = 0;
  int descriptor = int(sys(SYS_openat, AT_FDCWD, folder, O_PATH | O_CLOEXEC));
  std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  if (descriptor >= 0 &&
      (size = sys(SYS_readlinkat, AT_FDCWD, link.c_str(), whole, sizeof whole)) > 0) {
    root.assign(whole, size_t(size));
  }
  sys(SYS_close, descriptor);
  made->tree = root + "/tree";
  made->network = network;
  made->uncovered.push_back(root);
  for (std::string_view left = open; !left.empty();) {
    size_t colon = left.find(':');
    made->uncovered.emplace_back(left.substr(0, colon));
    left = colon == std::string_view::npos ? "" : left.substr(colon + 1);
  }
  std::vector<std::string> threads;
  list("/proc/self/task", threads);
  for (const std::string& thread : threads) {
    made->others.insert(pid_t(atoi(thread.c_str())));
  }
  made->others.erase(pid_t(sys(SYS_gettid)));
  sys(SYS_mkdirat, AT_FDCWD, made->tree.c_str(), 0755);
  generation.fetch_add(1);
  state.store(made);
}

bool is_of_overlays() {
  return has_overlays;
}

void begin_overlays() {
  has_overlays = true;
}

std::string whole(int folder, const char* path) {
  std::string start;
  return *path == '/' ? path : folder_of(folder, start) ? start + "/" + path : "";
}

void end() {
  state.store(nullptr);
}

bool is_on() {
  if (!is_started) {  // the first call of all, before a library's own start or in it
    is_started = true;
    start();
  }
  State* now = state.load(std::memory_order_acquire);
  if (now == nullptr) {
    return false;
  }
  thread_local int asked_in = -1;
  thread_local bool is_ours = true;
  int current = generation.load(std::memory_order_relaxed);
  if (asked_in != current) {
    asked_in = current;
    is_ours = now->others.count(pid_t(sys(SYS_gettid))) == 0;
  }
  return is_ours;
}

bool allows_network() {
  State* now = state.load();
  return now == nullptr || now->network;
}

std::string tree_at(const std::string& path) {
  return state.load()->tree + (path == "/" ? "" : path);
}

std::string Place::at() const {
  return kind == kMine ? mine() : path;
}

std::string Place::mine() const {
  return is_covered ? tree_at(path) : path;
}

std::string shown(std::string path) {
  State* now = state.load();
  if (now != nullptr && is_below(path, now->tree)) {
    path.erase(0, now->tree.size());
    return path.empty() ? "/" : path;
  }
  return path;
}

Place locate(int folder, const char* given, bool follow) {
  Place place;
  auto stop = [&](int error) {
    place.kind = Place::kAbsent;
    place.error = error;
    place.path.clear();  // another name than the last one is missing
    return place;
  };
  if (given == nullptr || *given == 0) {
    return stop(given == nullptr ? EFAULT : ENOENT);
  }
  std::string start;
  if (*given != '/' && !folder_of(folder, start)) {
    return stop(errno);
  }
  std::vector<std::string> left;  // the names still to go, the next one last
  auto push = [&](std::string_view text) {
    std::vector<std::string> words;
    while (!text.empty()) {
      size_t slash = text.find('/');
      std::string_view word = text.substr(0, slash);
      if (!word.empty() && word != ".") {
        words.emplace_back(word);
      }
      text = slash == std::string_view::npos ? "" : text.substr(slash + 1);
    }
    left.insert(left.end(), words.rbegin(), words.rend());
  };
  std::string_view text = given;
  bool is_folders_name = text.back() == '/' || text == "." ||
                         (text.size() > 1 && text.substr(text.size() - 2) == "/.");
  push(text);
  push(start);
  std::vector<Step> steps{{true, true}};
  std::string path;  // "" is the root
  int links = 0;
  auto be_root = [&] {
    lstat_of("/", &place.status);
    place.kind = Place::kReal;
    place.hides_real = true;
    place.is_removed = false;
    place.is_covered = true;
    steps.assign(1, {true, true});
    path.clear();
  };
  auto be_folder = [&] {  // the one that the path has come to
    if (path.empty()) {
      return be_root();
    }
    place.path = path;
    place.is_covered = is_covered(path);
    place.is_removed = false;
    place.kind = place.is_covered && steps.back().is_mine ? Place::kMine : Place::kReal;
    place.hides_real = steps.back().is_real;
    lstat_of(place.at(), &place.status);
  };
  be_root();
  while (!left.empty()) {
    if (place.kind == Place::kAbsent) {
      return stop(ENOENT);
    }
    if (!S_ISDIR(place.status.st_mode)) {
      return stop(ENOTDIR);
    }
    std::string name = std::move(left.back());
    left.pop_back();
    if (name.size() > NAME_MAX) {
      return stop(ENAMETOOLONG);
    }
    if (name == "..") {
      if (path.empty()) {
        continue;
      }
      path.erase(path.rfind('/'));
      steps.pop_back();
      be_folder();
      continue;
    }
    Step step = steps.back();
    path += "/" + name;
    place.path = path;
    place.is_covered = is_covered(path);
    place.kind = Place::kAbsent;
    place.is_removed = false;
    struct stat real;
    int error = ENOENT;
    place.hides_real = step.is_real && lstat_of(path, &real) == 0;
    if (step.is_real && !place.hides_real) {
      error = errno;
    }
    bool is_mine = false;
    if (place.is_covered && step.is_mine && lstat_of(tree_at(path), &place.status) == 0) {
      is_mine = true;
      if (S_ISLNK(place.status.st_mode) && link_of(tree_at(path)) == kGone) {
        place.is_removed = true;
        error = ENOENT;
      } else {
        place.kind = Place::kMine;
      }
    } else if (place.hides_real) {
      place.kind = Place::kReal;
      place.status = real;
    }
    if (place.kind == Place::kAbsent) {
      if (error != ENOENT) {
        return stop(error);
      }
      continue;
    }
    if (S_ISLNK(place.status.st_mode) && (follow || is_folders_name || !left.empty())) {
      if (++links > kMostLinks) {
        return stop(ELOOP);
      }
      std::string target = link_of(place.at());
      if (target.empty()) {
        return stop(ENOENT);
      }
      bool is_the_kernels = !place.is_covered && is_below(path, "/proc") &&
                            (target[0] == '/' || target.find(':') != std::string::npos);
      if (is_the_kernels && left.empty()) {  // it may be a pipe, or a file without a name
        return sys(SYS_newfstatat, AT_FDCWD, path.c_str(), &place.status, 0) == 0 ? place
                                                                                  : stop(errno);
      }
      if (is_the_kernels) {
        target = shown(target);
      }
      is_folders_name = is_folders_name || (left.empty() && target.back() == '/');
      push(target);
      if (target[0] == '/') {
        be_root();
      } else {
        path.erase(path.rfind('/'));
        be_folder();
      }
      continue;
    }
    if (S_ISDIR(place.status.st_mode)) {
      bool sees_real = place.hides_real && S_ISDIR(real.st_mode) &&
                       !(is_mine && is_there(tree_at(path) + "/" + kOpaque));
      steps.push_back({is_mine || path == "/dev", sees_real});  // /dev/shm is covered, /dev is not
    }
  }
  place.path = path.empty() ? "/" : path;
  if (place.exists() && is_folders_name && !S_ISDIR(place.status.st_mode)) {
    return stop(ENOTDIR);
  }
  place.error = place.exists() ? 0 : ENOENT;
  return place;
}

}  // namespace pytracer::view
