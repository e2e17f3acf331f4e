// Writes the seeds of the fuzzer's corpus: make_corpus DIRECTORY. The fuzzer's own discoveries lie
// beside them under their hashes.
#include "samples.h"

#include <fstream>
#include <iostream>
#include <string>

namespace {

using namespace samples;

std::string directory;

void save(const std::string& name, const Bytes& bytes) {
  std::ofstream file(directory + "/" + name, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
}

template <typename Item>
Bytes with(Bytes bytes, size_t at, Item item) {
  store(bytes, at, item);
  repair_checksums(bytes);
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: make_corpus DIRECTORY\n";
    return 2;
  }
  directory = argv[1];
  using pytracer::Table;
  Bytes whole = trace(40);
  size_t strings = chunk_of(whole, Table::kStrings);
  size_t events = chunk_of(whole, Table::kEvents);
  save("whole", whole);
  save("empty", {});
  save("no_rows", trace(0));
  save("many_events", trace(5000));
  save("unfinished", trace(40, false));
  for (size_t cut : {7, 15, 16, 30, 52, 300}) {
    save("cut_at_" + std::to_string(cut),
         Bytes(whole.begin(), whole.begin() + static_cast<long>(cut)));
  }
  for (size_t at : {size_t{3}, size_t{9}, events + 3, events + 13, events + 60}) {
    Bytes flipped = whole;
    flipped[at] ^= 0x10;
    save("flipped_at_" + std::to_string(at), flipped);
  }
  save("newer_major", with(whole, 8, uint16_t{99}));
  save("newer_minor", with(whole, 10, uint16_t{99}));
  save("unknown_table", with(whole, events + 8, uint16_t{77}));
  save("unknown_flags", with(whole, events + 11, uint8_t{1}));
  save("unknown_column", with(whole, events + kChunkHeader, uint8_t{99}));
  save("absurd_rows", with(whole, events + 12, uint32_t{0xFFFFFFFF}));
  save("too_many_rows", with(whole, events + 12, uint32_t{65536}));
  save("absurd_first_row", with(whole, events + 16, uint64_t{1} << 47));
  save("gap", with(whole, events + 16, uint64_t{100}));
  save("absurd_payload", with(whole, events + 24, uint32_t{0xFFFFFFF0}));
  save("absurd_column", with(whole, events + kChunkHeader + 4, uint32_t{0xFFFFFFFF}));
  save("absurd_string", with(whole, strings + kChunkHeader + 12, uint32_t{0x7FFFFFFF}));
  save("absurd_text", with(whole, strings + kChunkHeader + 12 + 24 + 4, uint32_t{0x7FFFFFFF}));
  return 0;
}
