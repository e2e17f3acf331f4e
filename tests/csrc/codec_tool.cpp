// codec_tool compress | decompress SIZE: our LZ4 from standard input to standard output, so that
// stranger.py can compare it with the real one.
#include "codec.h"

#include <cstdlib>
#include <iostream>
#include <iterator>
#include <string_view>
#include <vector>

int main(int argc, char** argv) {
  using namespace pytracer;
  std::string_view action = argc > 1 ? argv[1] : "";
  std::vector<char> text((std::istreambuf_iterator<char>(std::cin)), {});
  std::vector<uint8_t> in(text.begin(), text.end());
  std::vector<uint8_t> out;
  bool good = false;
  if (action == "compress") {
    out.resize(lz4_bound(in.size()));
    out.resize(lz4_compress(in, out));
    good = !out.empty();
  } else if (action == "decompress" && argc > 2) {
    out.resize(std::strtoull(argv[2], nullptr, 10));
    good = lz4_decompress(in, out);
  }
  std::cout.write(reinterpret_cast<const char*>(out.data()),
                  static_cast<std::streamsize>(out.size()));
  return good ? 0 : 1;
}
