// Calls that start programs and that connect, and what happens as a program starts.

#include "calls.h"
#include "landlock.h"
#include "system.h"
#include "traps.h"
#include "tree.h"

#include <arpa/inet.h>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

extern char** environ;

namespace pytracer::view {

namespace {

constexpr const char* kVariables[] = {"LD_PRELOAD",
                                      "PYTRACER_VIEW",
                                      "PYTRACER_VIEW_OPEN",
                                      "PYTRACER_VIEW_NETWORK",
                                      "PYTRACER_VIEW_TRAPS"};

std::string& restricted_to() {
  static auto* folders = new std::string;
  return *folders;
}

// The environment of a program that starts: with our variables, whatever else it is to be.
struct Variables {
  explicit Variables(char* const* given) {
    for (char* const* one = given; one != nullptr && *one != nullptr; one++) {
      all.push_back(*one);
    }
    for (const char* name : kVariables) {
      size_t size = std::strlen(name);
      const char* ours = getenv(name);
      bool is_there = false;
      for (char* one : all) {
        is_there = is_there || (std::strncmp(one, name, size) == 0 && one[size] == '=');
      }
      if (ours != nullptr && !is_there) {
        text.push_back(std::string(name) + "=" + ours);
      }
    }
    for (std::string& one : text) {
      all.push_back(one.data());
    }
    all.push_back(nullptr);
  }

  std::vector<std::string> text;
  std::vector<char*> all;
};

int execute(const char* path, char* const* words, char* const* given) {
  if (!is_on()) {
    return int(sys(SYS_execve, path, words, given));
  }
  Place place = locate(AT_FDCWD, path, true);
  if (!place.exists()) {
    errno = place.error;
    return -1;
  }
  if (!restricted_to().empty()) {
    restrict_writing(restricted_to().c_str());
  }
  return int(sys(SYS_execve, place.at().c_str(), words, Variables(given).all.data()));
}

bool is_of_another_machine(const struct sockaddr* address) {
  if (address == nullptr || allows_network()) {
    return false;
  }
  if (address->sa_family == AF_INET) {
    auto* internet = reinterpret_cast<const sockaddr_in*>(address);
    uint32_t number = ntohl(internet->sin_addr.s_addr);
    return number >> 24 != 127 && number != 0;
  }
  if (address->sa_family == AF_INET6) {
    const in6_addr& number = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
    bool is_loopback4 = IN6_IS_ADDR_V4MAPPED(&number) && number.s6_addr[12] == 127;
    return !IN6_IS_ADDR_LOOPBACK(&number) && !IN6_IS_ADDR_UNSPECIFIED(&number) && !is_loopback4;
  }
  return false;
}

int refuse() {
  errno = ENETUNREACH;
  return -1;
}

// A socket's path, in the view. If it is too long for an address, its folder is opened.
template <typename Call>
int at_path(const struct sockaddr* address, socklen_t size, bool makes, Call&& call) {
  auto* given = reinterpret_cast<const sockaddr_un*>(address);
  if (!is_on() || address->sa_family != AF_UNIX || size <= offsetof(sockaddr_un, sun_path) ||
      given->sun_path[0] == 0) {
    return call(address, size);
  }
  std::string path(given->sun_path,
                   strnlen(given->sun_path, size - offsetof(sockaddr_un, sun_path)));
  Place place = locate(AT_FDCWD, path.c_str(), true);
  if (makes ? place.exists() : !place.exists()) {
    errno = makes ? EADDRINUSE : place.error;
    return -1;
  }
  if (makes && (place.path.empty() || !make_room(place))) {
    return -1;
  }
  std::string at = makes ? place.mine() : place.at();
  size_t slash = at.rfind('/');
  int folder = -1;
  sockaddr_un moved = {};
  moved.sun_family = AF_UNIX;
  std::string name = at;
  if (name.size() >= sizeof moved.sun_path) {
    folder = int(sys(
        SYS_openat, AT_FDCWD, at.substr(0, slash + 1).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
    name = "/proc/self/fd/" + std::to_string(folder) + at.substr(slash);
  }
  if (name.size() >= sizeof moved.sun_path) {
    sys(SYS_close, folder);
    errno = ENAMETOOLONG;
    return -1;
  }
  std::strcpy(moved.sun_path, name.c_str());
  int done = call(reinterpret_cast<sockaddr*>(&moved), socklen_t(sizeof moved));
  int error = errno;
  sys(SYS_close, folder);
  errno = error;
  return done;
}

bool is_here(const char* name) {
  char own[256] = {};
  unsigned char number[16];
  gethostname(own, sizeof own - 1);
  return name == nullptr || allows_network() || std::strcmp(name, own) == 0 ||
         std::strcmp(name, "localhost") == 0 || inet_pton(AF_INET, name, number) == 1 ||
         inet_pton(AF_INET6, name, number) == 1;
}

}  // namespace

// Before the program's own code. Other processes, in which nobody asks for a view, stay as they
// are.
void start() {
  const char* folder = getenv("PYTRACER_VIEW");
  const char* preloaded = getenv("LD_PRELOAD");
  if (folder == nullptr || preloaded == nullptr || std::strstr(preloaded, "/_view.so") == nullptr) {
    return;
  }
  if (std::strcmp(folder, "namespaces") == 0) {
    return begin_overlays();
  }
  const char* open = getenv("PYTRACER_VIEW_OPEN");
  begin(folder, open == nullptr ? "" : open, getenv("PYTRACER_VIEW_NETWORK") != nullptr);
  std::string folders = folder;
  folders += open == nullptr || *open == 0 ? "" : std::string(":") + open;
  restrict_writing(folders.c_str());
  trap_changes();
}

void* libcs(const char* name) {
  static void* libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
  return dlsym(libc == nullptr ? RTLD_NEXT : libc, name);
}

void restrict_children(const char* folders) {
  restricted_to() = folders;
}

}  // namespace pytracer::view

using namespace pytracer::view;

REPLACES(int, execve, const char* path, char* const* words, char* const* given) {
  return execute(path, words, given);
}

REPLACES(int, execv, const char* path, char* const* words) {
  return execute(path, words, environ);
}

#define SPAWNS(name)                                                                         \
  REPLACES(int,                                                                              \
           name,                                                                             \
           pid_t* child,                                                                     \
           const char* path,                                                                 \
           const posix_spawn_file_actions_t* actions,                                        \
           const posix_spawnattr_t* attributes,                                              \
           char* const* words,                                                               \
           char* const* given) {                                                             \
    auto real = reinterpret_cast<decltype(&view_##name)>(libcs(#name));                      \
    if (!is_on()) {                                                                          \
      return real(child, path, actions, attributes, words, given);                           \
    }                                                                                        \
    Place place;                                                                             \
    bool is_path = std::strchr(path, '/') != nullptr;                                        \
    if (is_path && !(place = locate(AT_FDCWD, path, true)).exists()) {                       \
      return place.error;                                                                    \
    }                                                                                        \
    std::string at = is_path ? place.at() : path;                                            \
    return real(child, at.c_str(), actions, attributes, words, Variables(given).all.data()); \
  }
SPAWNS(posix_spawn)
SPAWNS(posix_spawnp)

REPLACES(int, connect, int socket, const struct sockaddr* address, socklen_t size) {
  auto call = [&](const struct sockaddr* to, socklen_t length) {
    return int(sys(SYS_connect, socket, to, length));
  };
  return is_on() && is_of_another_machine(address) ? refuse() : at_path(address, size, false, call);
}

REPLACES(int, bind, int socket, const struct sockaddr* address, socklen_t size) {
  return at_path(address, size, true, [&](const struct sockaddr* to, socklen_t length) {
    return int(sys(SYS_bind, socket, to, length));
  });
}

REPLACES(ssize_t,
         sendto,
         int socket,
         const void* data,
         size_t size,
         int flags,
         const struct sockaddr* address,
         socklen_t length) {
  if (is_on() && is_of_another_machine(address)) {
    return refuse();
  }
  return sys(SYS_sendto, socket, data, size, flags, address, length);
}

REPLACES(ssize_t, sendmsg, int socket, const struct msghdr* message, int flags) {
  if (is_on() && is_of_another_machine(static_cast<sockaddr*>(message->msg_name))) {
    return refuse();
  }
  return sys(SYS_sendmsg, socket, message, flags);
}

REPLACES(int,
         getaddrinfo,
         const char* name,
         const char* service,
         const struct addrinfo* hints,
         struct addrinfo** found) {
  using Real = int (*)(const char*, const char*, const addrinfo*, addrinfo**);
  if (is_on() && !is_here(name)) {
    return EAI_FAIL;
  }
  return reinterpret_cast<Real>(libcs("getaddrinfo"))(name, service, hints, found);
}

REPLACES(struct hostent*, gethostbyname, const char* name) {
  if (is_on() && !is_here(name)) {
    return nullptr;
  }
  return reinterpret_cast<hostent* (*)(const char*)>(libcs("gethostbyname"))(name);
}

// Also where the program's own code makes no call.
__attribute__((constructor)) static void begin_at_the_start() {
  is_on();
}
