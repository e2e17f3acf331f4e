// Calls that list folders and move between them.

#include "calls.h"
#include "paths.h"
#include "system.h"
#include "tree.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <map>
#include <memory>
#include <mutex>
#include <sys/syscall.h>
#include <unistd.h>

namespace pytracer::view {

namespace {

// What a program reads of a folder that has a private version.
struct Listing {
  Place folder;
  std::vector<std::string> left;
  size_t next = 0;
  dirent64 entry = {};

  void fill() {
    left = names(folder);
    left.insert(left.begin(), {".", ".."});
    next = 0;
  }
};

std::mutex mutex;

std::map<DIR*, std::unique_ptr<Listing>>& listings() {
  static auto* all = new std::map<DIR*, std::unique_ptr<Listing>>;  // used until the very end
  return *all;
}

Listing* listing_of(DIR* stream) {
  std::lock_guard lock(mutex);
  auto found = listings().find(stream);
  return found == listings().end() ? nullptr : found->second.get();
}

DIR* with_listing(DIR* stream, const Place& folder) {
  if (stream != nullptr && folder.is_merged()) {
    auto listing = std::make_unique<Listing>();
    listing->folder = folder;
    listing->fill();
    std::lock_guard lock(mutex);
    listings()[stream] = std::move(listing);
  }
  return stream;
}

unsigned char type_of(mode_t mode) {
  return static_cast<unsigned char>(IFTODT(mode));
}

template <typename Entry>
Entry* next_of(DIR* stream, const char* name) {
  Listing* listing = listing_of(stream);
  if (listing == nullptr) {
    return reinterpret_cast<Entry* (*)(DIR*)>(libcs(name))(stream);
  }
  if (listing->next == listing->left.size()) {
    return nullptr;
  }
  const std::string& next = listing->left[listing->next++];
  Place place = locate(AT_FDCWD, (listing->folder.path + "/" + next).c_str(), false);
  dirent64& entry = listing->entry;
  entry.d_ino = place.status.st_ino;
  entry.d_off = off_t(listing->next);
  entry.d_reclen = sizeof entry;
  entry.d_type = type_of(place.status.st_mode);
  std::strncpy(entry.d_name, next.c_str(), sizeof entry.d_name - 1);
  return reinterpret_cast<Entry*>(&entry);
}

}  // namespace
}  // namespace pytracer::view

using namespace pytracer::view;

REPLACES(DIR*, opendir, const char* path) {
  auto real = reinterpret_cast<DIR* (*)(const char*)>(libcs("opendir"));
  if (!is_on()) {
    return real(path);
  }
  Place place = locate(AT_FDCWD, path, true);
  if (!place.exists()) {
    errno = place.error;
    return nullptr;
  }
  return with_listing(real(place.at().c_str()), place);
}

REPLACES(DIR*, fdopendir, int file) {
  DIR* stream = reinterpret_cast<DIR* (*)(int)>(libcs("fdopendir"))(file);
  return stream != nullptr && is_on() ? with_listing(stream, locate(file, ".", true)) : stream;
}

REPLACES(struct dirent*, readdir, DIR* stream) {
  return next_of<dirent>(stream, "readdir");
}

REPLACES(struct dirent64*, readdir64, DIR* stream) {
  return next_of<dirent64>(stream, "readdir64");
}

REPLACES(int, closedir, DIR* stream) {
  {
    std::lock_guard lock(mutex);
    listings().erase(stream);
  }
  return reinterpret_cast<int (*)(DIR*)>(libcs("closedir"))(stream);
}

REPLACES(void, rewinddir, DIR* stream) {
  if (Listing* listing = listing_of(stream)) {
    listing->fill();
  }
  reinterpret_cast<void (*)(DIR*)>(libcs("rewinddir"))(stream);
}

REPLACES(long, telldir, DIR* stream) {
  Listing* listing = listing_of(stream);
  return listing != nullptr ? long(listing->next)
                            : reinterpret_cast<long (*)(DIR*)>(libcs("telldir"))(stream);
}

REPLACES(void, seekdir, DIR* stream, long place) {
  if (Listing* listing = listing_of(stream)) {
    listing->next = std::min(size_t(place), listing->left.size());
  } else {
    reinterpret_cast<void (*)(DIR*, long)>(libcs("seekdir"))(stream, place);
  }
}

REPLACES(int, chdir, const char* path) {
  if (!is_on()) {
    return int(sys(SYS_chdir, path));
  }
  Place place = locate(AT_FDCWD, path, true);
  if (!place.exists()) {
    errno = place.error;
    return -1;
  }
  return int(sys(SYS_chdir, place.at().c_str()));
}

REPLACES(char*, getcwd, char* into, size_t size) {
  char buffer[PATH_MAX];
  if (sys(SYS_getcwd, buffer, sizeof buffer) < 0) {
    return nullptr;
  }
  std::string path = shown(buffer);
  if (into == nullptr) {
    into = static_cast<char*>(std::malloc(std::max(size, path.size() + 1)));
  } else if (path.size() >= size) {
    errno = ERANGE;
    return nullptr;
  }
  return into == nullptr ? nullptr : std::strcpy(into, path.c_str());
}

REPLACES(char*, __getcwd_chk, char* into, size_t size, size_t) {
  return view_getcwd(into, size);
}

REPLACES(char*, get_current_dir_name, void) {
  return view_getcwd(nullptr, 0);
}
