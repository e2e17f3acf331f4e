#include "trace_source.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace pytracer {
namespace {

FileError read_error(const std::string& path, int error) {
  using Kind = FileError::Kind;
  std::string reason = std::generic_category().message(error);
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return {Kind::kMissing, path, "there is no such file", "see whether the path is right"};
    case EACCES:
    case EPERM:
      return {Kind::kUnreadable,
              path,
              "may not be read (" + reason + ")",
              "ask its owner for permission to read it"};
    default:
      return {Kind::kIo, path, "reading failed (" + reason + ")", "see whether the disk is well"};
  }
}

uint64_t checked_size(int fd, const std::string& path) {
  using Kind = FileError::Kind;
  struct stat status;
  if (::fstat(fd, &status) != 0) {
    throw read_error(path, errno);
  }
  if (S_ISDIR(status.st_mode)) {
    throw FileError(Kind::kDirectory, path, "this is a directory", "name a trace inside it");
  }
  if (!S_ISREG(status.st_mode)) {
    throw FileError(Kind::kNotAFile, path, "this is not a regular file", "copy it into one first");
  }
  return static_cast<uint64_t>(status.st_size);
}

}  // namespace

Source::Source(std::span<const uint8_t> bytes, std::string name)
    : name_(std::move(name)), size_(bytes.size()), here_(bytes) {}

Source::Source(const std::string& path) : name_(path) {
  // Without O_NONBLOCK, opening a pipe would wait for a writer.
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) {
    throw read_error(path, errno);
  }
  try {
    size_ = checked_size(fd_, path);
  } catch (...) {
    ::close(fd_);  // the destructor does not run for a constructor that throws
    throw;
  }
}

Source::~Source() {
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

uint64_t Source::look_again() {
  if (fd_ >= 0) {
    size_ = checked_size(fd_, name_);
  }
  return size_;
}

std::span<const uint8_t> Source::look(uint64_t at, size_t count) {
  at = std::min(at, size_);
  count = static_cast<size_t>(std::min<uint64_t>(count, size_ - at));
  if (at < position_ || at + count > position_ + here_.size()) {
    fill(at, count);
  }
  return here_.subspan(std::min(static_cast<size_t>(at - position_), here_.size()));
}

// Reads more than is asked for: most chunks are small, and the next one is needed next.
void Source::fill(uint64_t at, size_t count) {
  buffer_.resize(static_cast<size_t>(std::min<uint64_t>(std::max(count, kPiece), size_ - at)));
  size_t done = 0;
  while (done < buffer_.size()) {
    ssize_t got =
        ::pread(fd_, buffer_.data() + done, buffer_.size() - done, static_cast<off_t>(at + done));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      throw read_error(name_, errno);
    }
    if (got == 0) {
      break;  // the file was cut meanwhile
    }
    done += static_cast<size_t>(got);
  }
  here_ = std::span(buffer_).first(done);
  position_ = at;
}

uint64_t Source::next_data(uint64_t at) const {
  if (fd_ < 0 || at >= size_) {
    return std::min(at, size_);
  }
  off_t found = ::lseek(fd_, static_cast<off_t>(at), SEEK_DATA);
  if (found < 0) {
    return errno == ENXIO ? size_ : at;  // no more data, or a disk that does not know its holes
  }
  return std::min(static_cast<uint64_t>(found), size_);
}

uint64_t Source::size_of_data() const {
  uint64_t end = fd_ < 0 ? size_ : 0;
  for (uint64_t at = next_data(end); at < size_; at = next_data(end)) {
    off_t hole = ::lseek(fd_, static_cast<off_t>(at), SEEK_HOLE);
    end = hole < 0 ? size_ : std::min(static_cast<uint64_t>(hole), size_);
  }
  return end;
}

bool Source::is_zero_from(uint64_t at) {
  while ((at = next_data(at)) < size_) {
    auto piece = look(at, 1);
    if (piece.empty() ||
        std::any_of(piece.begin(), piece.end(), [](uint8_t b) { return b != 0; })) {
      return piece.empty();
    }
    at += piece.size();
  }
  return true;
}

FileError no_memory_for(const std::string& path) {
  return {FileError::Kind::kIo,
          path,
          "reading it takes more memory than there is",
          "read it on a machine with more"};
}

}  // namespace pytracer
