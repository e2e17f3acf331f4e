#include "traps.h"

#include "paths.h"
#include "system.h"
#include "tree.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <ucontext.h>

namespace pytracer::view {

namespace {

#if defined(__x86_64__)
constexpr uint32_t kMachine = AUDIT_ARCH_X86_64;
#else
constexpr uint32_t kMachine = AUDIT_ARCH_AARCH64;
#endif

constexpr uint32_t kWrites = O_WRONLY | O_RDWR | O_CREAT | O_TRUNC;

// The calls that change files. Those that open one are beside them.
constexpr long kChanges[] = {
    SYS_renameat2,
    SYS_renameat,
    SYS_unlinkat,
    SYS_mkdirat,
    SYS_symlinkat,
    SYS_linkat,
    SYS_fchmodat,
    SYS_fchownat,
    SYS_utimensat,
    SYS_truncate,
#if defined(__x86_64__)
    SYS_rename,
    SYS_unlink,
    SYS_mkdir,
    SYS_rmdir,
    SYS_symlink,
    SYS_link,
    SYS_creat,
    SYS_chmod,
#endif
};

// Does what the call asks for, in the view. Returns as the kernel does.
long change(long number, const long* given) {
  auto path = [&](int i) { return reinterpret_cast<const char*>(given[i]); };
  auto file = [&](int i) { return int(given[i]); };
  long done = -1;
  switch (number) {
    case SYS_openat:
      done = open_in(file(0), path(1), file(2), mode_t(given[3]));
      break;
    case SYS_renameat2:
      done = rename_in(file(0), path(1), file(2), path(3), unsigned(given[4]));
      break;
    case SYS_renameat:
      done = rename_in(file(0), path(1), file(2), path(3), 0);
      break;
    case SYS_unlinkat:
      done = unlink_in(file(0), path(1), file(2) & AT_REMOVEDIR);
      break;
    case SYS_mkdirat:
      done = mkdir_in(file(0), path(1), mode_t(given[2]));
      break;
    case SYS_symlinkat:
      done = symlink_in(path(0), file(1), path(2));
      break;
    case SYS_linkat:
      done = link_in(file(0), path(1), file(2), path(3), file(4));
      break;
    case SYS_fchmodat:
      done = chmod_in(file(0), path(1), mode_t(given[2]));
      break;
    case SYS_fchownat:
      done = chown_in(file(0), path(1), uid_t(given[2]), gid_t(given[3]), file(4));
      break;
    case SYS_utimensat:
      done = times_in(file(0), path(1), reinterpret_cast<const timespec*>(given[2]), file(3));
      break;
    case SYS_truncate:
      done = truncate_in(path(0), off_t(given[1]));
      break;
#if defined(__x86_64__)
    case SYS_chmod:
      done = chmod_in(AT_FDCWD, path(0), mode_t(given[1]));
      break;
    case SYS_open:
      done = open_in(AT_FDCWD, path(0), file(1), mode_t(given[2]));
      break;
    case SYS_creat:
      done = open_in(AT_FDCWD, path(0), O_WRONLY | O_CREAT | O_TRUNC, mode_t(given[1]));
      break;
    case SYS_rename:
      done = rename_in(AT_FDCWD, path(0), AT_FDCWD, path(1), 0);
      break;
    case SYS_unlink:
      done = unlink_in(AT_FDCWD, path(0), false);
      break;
    case SYS_rmdir:
      done = unlink_in(AT_FDCWD, path(0), true);
      break;
    case SYS_mkdir:
      done = mkdir_in(AT_FDCWD, path(0), mode_t(given[1]));
      break;
    case SYS_symlink:
      done = symlink_in(path(0), AT_FDCWD, path(1));
      break;
    case SYS_link:
      done = link_in(AT_FDCWD, path(0), AT_FDCWD, path(1), 0);
      break;
#endif
    default:
      return -ENOSYS;
  }
  return done < 0 ? -errno : done;
}

void trapped(int, siginfo_t* info, void* context) {
  int before = errno;
  mcontext_t& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  auto* all = machine.gregs;
  long given[] = {all[REG_RDI], all[REG_RSI], all[REG_RDX], all[REG_R10], all[REG_R8]};
  all[REG_RAX] = change(info->si_syscall, given);
#else
  auto* all = machine.regs;
  long given[] = {long(all[0]), long(all[1]), long(all[2]), long(all[3]), long(all[4])};
  all[0] = static_cast<unsigned long long>(change(info->si_syscall, given));
#endif
  errno = before;
}

sock_filter load(size_t offset) {
  return BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(offset));
}

// Goes on with the next line if the loaded number is this, or else passes over `lines`.
sock_filter skip_unless(uint32_t value, uint8_t lines) {
  return BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, lines);
}

}  // namespace

void trap_changes() {
  struct sigaction action = {};
  action.sa_sigaction = trapped;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART;
  sigaction(SIGSYS, &action, nullptr);
  if (getenv("PYTRACER_VIEW_TRAPS") != nullptr) {
    return;  // the filter came with this process
  }
  constexpr size_t kLast = offsetof(seccomp_data, args) + 5 * sizeof(uint64_t);
  constexpr auto kNumber = offsetof(seccomp_data, nr);
  auto argument = [](int i) { return offsetof(seccomp_data, args) + size_t(i) * sizeof(uint64_t); };
  const sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  const sock_filter trap = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
  std::vector<sock_filter> rules{load(offsetof(seccomp_data, arch)),
                                 BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kMachine, 1, 0),
                                 allow,
                                 load(kLast),
                                 skip_unless(uint32_t(kOurs), 3),
                                 load(kLast + 4),
                                 skip_unless(uint32_t(kOurs >> 32), 1),
                                 allow,
                                 load(kNumber)};
  for (long number : kChanges) {
    rules.push_back(skip_unless(uint32_t(number), 1));
    rules.push_back(trap);
  }
  auto opens = [&](long number, int flags) {
    rules.push_back(skip_unless(uint32_t(number), 4));
    rules.push_back(load(argument(flags)));
    rules.push_back(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, kWrites, 0, 1));
    rules.push_back(trap);
    rules.push_back(allow);
  };
  opens(SYS_openat, 2);
#if defined(__x86_64__)
  opens(SYS_open, 1);
#endif
  rules.push_back(allow);
  sock_fprog program{static_cast<unsigned short>(rules.size()), rules.data()};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0) {
    setenv("PYTRACER_VIEW_TRAPS", "1", 1);
  }
}

}  // namespace pytracer::view
