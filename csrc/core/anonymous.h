// Texts without the paths of the machine they were recorded on.
#pragma once

#include <string>
#include <string_view>

namespace pytracer {

// Shortens every absolute path in the text. A path below `root` becomes relative to it. A path of
// an installed package begins with site-packages, one of Python's own with lib/python3.x. Of any
// other path only the file's name stays. A text that begins with a slash is one path, with its
// spaces.
std::string without_paths(std::string_view text, std::string_view root);

}  // namespace pytracer
