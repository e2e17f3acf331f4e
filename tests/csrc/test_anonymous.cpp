#include "anonymous.h"
#include "check.h"

namespace {

using pytracer::without_paths;

TEST(a_path_is_relative_to_the_root_or_only_a_name) {
  CHECK_EQ(without_paths("/home/ann/run/net/model.py", "/home/ann/run"), "net/model.py");
  CHECK_EQ(without_paths("/home/ann/runs/model.py", "/home/ann/run"), "model.py");
  CHECK_EQ(without_paths("/home/ann/run", "/home/ann/run"), ".");
  CHECK_EQ(without_paths("/home/ann smith/my model.py", "/"), "my model.py");
  CHECK_EQ(without_paths("/home/ann/", ""), "ann");
}

TEST(what_is_installed_says_where_in_its_package) {
  CHECK_EQ(without_paths("/home/ann/v/lib/python3.11/site-packages/torch/nn/a.py", "/home/ann"),
           "site-packages/torch/nn/a.py");
  CHECK_EQ(without_paths("/usr/lib/python3/dist-packages/yaml.py", ""), "dist-packages/yaml.py");
  CHECK_EQ(without_paths("/opt/ann/lib/python3.11/threading.py", ""),
           "lib/python3.11/threading.py");
}

TEST(a_path_inside_a_text_is_found) {
  CHECK_EQ(without_paths("load /data/ann/x.pt, twice", ""), "load x.pt, twice");
  CHECK_EQ(without_paths("at='/data/my dir/x.pt'", "/data/my dir"), "at='x.pt'");
  CHECK_EQ(without_paths("file:///data/ann/x.pt", ""), "file:x.pt");
}

TEST(what_is_no_path_stays) {
  for (const char* text :
       {"", "/", "aten::add", "layers.0.mlp", "a/b", "3 / 4", "<frozen runpy>"}) {
    CHECK_EQ(without_paths(text, "/home/ann"), text);
  }
}

}  // namespace
