// A test harness in one header: the core's tests need nothing but a compiler.
//
//   TEST(name_of_the_rule) { CHECK_EQ(1 + 1, 2); }
//
// A failed check prints its place and its values, and the test goes on. run_all() runs every test
// of the executable, or those whose name contains its argument.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

namespace check {

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define PYTRACER_SANITIZED
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define PYTRACER_SANITIZED
#endif

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline std::atomic<int> failures{0};

template <typename Value>
std::string show(const Value& value) {
  std::ostringstream out;
  if constexpr (std::is_enum_v<Value>) {
    out << static_cast<int64_t>(value);
  } else if constexpr (std::is_same_v<Value, uint8_t>) {
    out << static_cast<int>(value);
  } else if constexpr (requires { out << value; }) {
    out << value;
  } else if constexpr (requires { value.begin(); }) {
    out << '[';
    size_t shown = 0;
    for (const auto& item : value) {
      out << (shown > 0 ? ", " : "") << (shown < 20 ? show(item) : "...");
      if (++shown > 20) {
        break;
      }
    }
    out << ']';
  } else {
    out << "(a value)";
  }
  return out.str();
}

// One string per failure, written at once: threads may fail together.
inline void fail(const char* file, int line, const std::string& what) {
  ++failures;
  std::ostringstream out;
  out << file << ':' << line << ": " << what << '\n';
  std::cerr << out.str();
}

struct Register {
  Register(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

inline int run_all(int argc, char** argv) {
  std::string_view only = argc > 1 ? argv[1] : "";
  int failed_tests = 0;
  int run = 0;
  for (const Test& test : tests()) {
    if (std::string_view(test.name).find(only) == std::string_view::npos) {
      continue;
    }
    int before = failures;
    test.body();
    ++run;
    if (failures != before) {
      ++failed_tests;
      std::cerr << "FAILED " << test.name << '\n';
    }
  }
  std::cerr << run << " tests, " << failed_tests << " failed\n";
  return failed_tests == 0 && run > 0 ? 0 : 1;
}

// Runs `body(number)` on `count` threads that start together; returns when all are done.
inline void run_threads(int count, const std::function<void(int)>& body) {
  std::atomic<int> waiting{count};
  std::vector<std::thread> threads;
  for (int number = 0; number < count; ++number) {
    threads.emplace_back([&, number] {
      --waiting;
      while (waiting > 0) {
        std::this_thread::yield();
      }
      body(number);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace check

#define TEST(name)                                                   \
  static void test_##name();                                         \
  static const check::Register register_##name{#name, &test_##name}; \
  static void test_##name()

#define CHECK(condition)                                  \
  do {                                                    \
    if (!(condition)) {                                   \
      check::fail(__FILE__, __LINE__, "not " #condition); \
    }                                                     \
  } while (false)

#define CHECK_EQ(left, right)                                                                    \
  do {                                                                                           \
    const auto& left_value = (left);                                                             \
    const auto& right_value = (right);                                                           \
    if (!(left_value == right_value)) {                                                          \
      check::fail(__FILE__,                                                                      \
                  __LINE__,                                                                      \
                  #left " == " + check::show(left_value) + ", not " + check::show(right_value)); \
    }                                                                                            \
  } while (false)

// `body_with_error` sees the exception as `error`.
#define CHECK_THROWS(expression, Exception, body_with_error)                \
  do {                                                                      \
    bool thrown = false;                                                    \
    try {                                                                   \
      (void)(expression);                                                   \
    } catch (const Exception& error) {                                      \
      thrown = true;                                                        \
      body_with_error;                                                      \
    }                                                                       \
    if (!thrown) {                                                          \
      check::fail(__FILE__, __LINE__, #expression " threw no " #Exception); \
    }                                                                       \
  } while (false)
