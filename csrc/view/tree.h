// The private view of the files: a folder whose `tree` lies over the real files.
//
// A path's private version is below `tree`. A link to kGone says that the path is removed, and a
// folder that holds kOpaque shows nothing of the real one. Everything is in files, so all processes
// of a program share it. All calls return -1 and set errno, as the system's do.
//
// Nothing here calls a function of libc that `calls.cpp` replaces: system calls are made directly.

#pragma once

#include <fcntl.h>
#include <string>
#include <sys/stat.h>
#include <vector>

namespace pytracer::view {

constexpr const char* kGone = "/.pytracer-gone";
constexpr const char* kPrefix = ".pytracer-";  // names that begin so are the view's
constexpr const char* kOpaque = ".pytracer-opaque";

// Begins with the view in this folder. The folders in `open`, joined by colons, are not covered.
void begin(const char* folder, const char* open, bool network);
void end();
void start();  // if the environment asks for a view

// The kernel makes the view, by overlays. These rename no folder that was there before.
bool is_of_overlays();
void begin_overlays();

bool is_on();  // for the calling thread
bool allows_network();

// Where a path leads in the view, after all links.
struct Place {
  enum Kind { kAbsent, kMine, kReal };

  std::string path;     // absolute, as the program knows it
  Kind kind = kAbsent;  // of what is there
  int error = 0;        // why nothing is there; if only the last name is missing, it has a path
  bool is_covered = true;
  bool hides_real = false;  // there is a real one, which the view shows or would show
  bool is_removed = false;  // the view says that the real one is removed
  struct stat status = {};

  bool exists() const { return kind != kAbsent; }

  bool is_folder() const { return exists() && S_ISDIR(status.st_mode); }

  bool is_merged() const { return is_folder() && is_covered && (path == "/" || kind == kMine); }

  std::string at() const;    // where it is for the system
  std::string mine() const;  // where its private version is or would be
};

std::string tree_at(const std::string& path);  // where its private version is or would be

Place locate(int folder, const char* path, bool follow);
std::string shown(std::string path);  // a path of the system's, as the program knows it

// Finds where the system is to open the path with these flags, and makes it ready for that.
bool prepare(Place& place, int flags);

bool bring(Place& place, bool whole = false);  // makes a private version; `whole`: of all inside
bool make_room(Place& place);  // for a new file or folder, whose parent gets a private version
int remove(int folder, const char* path, bool is_folder);
int make_folder(int folder, const char* path, mode_t mode);
int rename(int from_folder, const char* from, int to_folder, const char* to, unsigned flags);
int move_by_copy(const std::string& from, const std::string& to);  // a folder; past the view
std::string whole(int folder, const char* path);      // an absolute path; "" if there is no folder
std::vector<std::string> names(const Place& folder);  // without . and ..

}  // namespace pytracer::view
