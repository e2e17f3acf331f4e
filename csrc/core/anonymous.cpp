#include "anonymous.h"

#include <algorithm>
#include <array>

namespace pytracer {

namespace {

// From here on, a path says nothing about the machine.
constexpr std::array<std::string_view, 3> kPublic = {
    "/site-packages/", "/dist-packages/", "/lib/python3."};

// After one of these, a slash only divides: a/b, ../b, 3/4.
bool continues_a_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         static_cast<unsigned char>(c) >= 0x80 ||
         std::string_view("._-/)]}").find(c) != std::string_view::npos;
}

bool ends_a_path(char c) {
  return static_cast<unsigned char>(c) <= ' ' ||
         std::string_view("'\"`,;:<>|()[]{}").find(c) != std::string_view::npos;
}

std::string_view shortened(std::string_view path, std::string_view root) {
  for (std::string_view mark : kPublic) {
    if (size_t found = path.rfind(mark); found != std::string_view::npos) {
      return path.substr(found + 1);
    }
  }
  if (root.size() > 1 && path.starts_with(root)) {
    std::string_view rest = path.substr(root.size());
    if (rest.empty()) {
      return ".";
    }
    if (rest.front() == '/' && rest.size() > 1) {
      return rest.substr(1);
    }
  }
  while (path.size() > 1 && path.back() == '/') {
    path.remove_suffix(1);
  }
  size_t last = path.rfind('/');
  return path.size() > 1 ? path.substr(last + 1) : path;
}

}  // namespace

std::string without_paths(std::string_view text, std::string_view root) {
  if (text.starts_with('/')) {
    return std::string(shortened(text, root));
  }
  std::string kept;
  for (size_t at = 0; at < text.size();) {
    if (text[at] != '/' || continues_a_word(text[at - 1])) {
      kept += text[at++];
      continue;
    }
    // A root may contain spaces, and is one path up to its end.
    bool below_root = root.size() > 1 && text.substr(at).starts_with(root);
    size_t end = at + (below_root ? root.size() : 1);
    end = static_cast<size_t>(
        std::find_if(text.begin() + static_cast<std::ptrdiff_t>(end), text.end(), ends_a_path) -
        text.begin());
    kept += shortened(text.substr(at, end - at), root);
    at = end;
  }
  return kept;
}

}  // namespace pytracer
