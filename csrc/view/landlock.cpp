#include "landlock.h"

#include <cstdint>
#include <fcntl.h>
#include <string>
#include <string_view>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pytracer::view {

namespace {

// Of <linux/landlock.h>, which old systems lack. The numbers are the same on every processor.
constexpr long kCreateRuleset = 444, kAddRule = 445, kRestrictSelf = 446;
constexpr uint32_t kAskVersion = 1, kPathBeneath = 1;
constexpr uint64_t kWriteFile = 1 << 1;
constexpr uint64_t kRemoveAndMake = 0x1ff0;  // bits 4 to 12
constexpr uint64_t kRefer = 1 << 13, kTruncate = 1 << 14;

struct PathBeneath {
  uint64_t allowed;
  int32_t folder;
} __attribute__((packed));

void allow(int ruleset, const std::string& path, uint64_t what) {
  int folder = int(syscall(SYS_openat, AT_FDCWD, path.c_str(), O_PATH | O_CLOEXEC));
  if (folder >= 0) {
    PathBeneath rule{what, folder};
    syscall(kAddRule, ruleset, kPathBeneath, &rule, 0u);
    syscall(SYS_close, folder);
  }
}

}  // namespace

bool restrict_writing(const char* folders) {
  long version = syscall(kCreateRuleset, nullptr, size_t{0}, kAskVersion);
  if (version < 1) {
    return false;
  }
  uint64_t all = kWriteFile | kRemoveAndMake;
  all |= version >= 2 ? kRefer : 0;
  all |= version >= 3 ? kTruncate : 0;
  int ruleset = int(syscall(kCreateRuleset, &all, sizeof all, 0u));
  if (ruleset < 0) {
    return false;
  }
  for (std::string_view left = folders; !left.empty();) {
    size_t colon = left.find(':');
    allow(ruleset, std::string(left.substr(0, colon)), all);
    left = colon == std::string_view::npos ? "" : left.substr(colon + 1);
  }
  uint64_t in_place = all & (kWriteFile | kTruncate);
  allow(ruleset, "/dev", in_place);
  allow(ruleset, "/proc", in_place);
  allow(ruleset, "/dev/shm", all);  // shm_open makes its files there
  bool well =
      prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && syscall(kRestrictSelf, ruleset, 0u) == 0;
  syscall(SYS_close, ruleset);
  return well;
}

}  // namespace pytracer::view
