// Texts without the paths of the machine they were recorded on.
#pragma once

#include <string>
#include <string_view>

namespace pytracer {

// Every absolute path in the text becomes a shorter one. What is below `root` is relative to it,
// what is installed begins with site-packages, Python's own with lib/python3.x, and of any other
// only the file's name stays. A text that begins with a slash is one path, spaces and all.
std::string without_paths(std::string_view text, std::string_view root);

}  // namespace pytracer
