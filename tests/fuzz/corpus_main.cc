// NAME_corpus_test CORPUS_FOLDER [--mutations N] [--seed S]: runs a fuzz target
// without libFuzzer, on its seeds, on each file of its corpus, and on N
// mutations of these. The same seed gives the same inputs. With --write-seeds
// it writes its seeds to the folder instead.
//
// The input that is being run is in the file `input` of
// $TEST_UNDECLARED_OUTPUTS_DIR (or else $TEST_TMPDIR or /tmp), which a crash
// leaves behind: put it into the corpus, under a name that says what it was.

#include <fcntl.h>
#include <google/protobuf/stubs/logging.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/mutator.h"
#include "tests/fuzz/seed_files.h"

namespace optstate::fuzz {
namespace {

// No target needs a tenth of this, whatever its input says.
constexpr rlim_t kMemoryBytesMax = rlim_t{2} << 30;

struct Arguments {
  std::string corpus;
  uint64_t mutations = 2000;
  uint64_t seed = 1;
  bool write_seeds = false;
};

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(2);
}

Arguments Parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const bool is_mutations = flag == "--mutations";
    if (is_mutations || flag == "--seed") {
      uint64_t* const value =
          is_mutations ? &arguments.mutations : &arguments.seed;
      if (i + 1 == argc || !absl::SimpleAtoi(argv[++i], value)) {
        Die(absl::StrCat(flag, " needs a number"));
      }
    } else if (flag == "--write-seeds") {
      arguments.write_seeds = true;
    } else {
      arguments.corpus = flag;
    }
  }
  if (arguments.corpus.empty()) {
    Die("usage: NAME_corpus_test CORPUS_FOLDER [--mutations N] [--seed S] "
        "[--write-seeds]");
  }
  return arguments;
}

// Returns the content of each file of the folder, in the order of their names.
std::vector<std::string> ReadCorpus(const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    paths.push_back(entry.path().string());
  }
  if (error) Die(absl::StrCat(folder, ": ", error.message()));
  if (paths.empty()) Die(absl::StrCat(folder, " has no files"));
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> inputs;
  for (const std::string& path : paths) {
    std::ifstream file(path, std::ios::binary);
    if (!file) Die(absl::StrCat(path, " cannot be read"));
    inputs.emplace_back(std::istreambuf_iterator<char>(file),
                        std::istreambuf_iterator<char>());
  }
  return inputs;
}

// Keeps the input that is being run in a file, for the case that it is the
// last.
class CurrentInput {
 public:
  CurrentInput() {
    const char* folder = "/tmp";
    for (const char* name : {"TEST_TMPDIR", "TEST_UNDECLARED_OUTPUTS_DIR"}) {
      const char* given = std::getenv(name);
      if (given != nullptr) folder = given;
    }
    path_ = absl::StrCat(folder, "/input.", ::getpid());
    fd_ = ::open(path_.c_str(), O_CREAT | O_RDWR | O_TRUNC | O_CLOEXEC, 0600);
    if (fd_ < 0) Die(absl::StrCat(path_, " cannot be made"));
  }
  ~CurrentInput() {
    ::close(fd_);
    ::unlink(path_.c_str());
  }
  CurrentInput(const CurrentInput&) = delete;
  CurrentInput& operator=(const CurrentInput&) = delete;

  const std::string& path() const { return path_; }

  void Run(const std::string& input) const {
    if (::ftruncate(fd_, 0) != 0 ||
        ::pwrite(fd_, input.data(), input.size(), 0) !=
            static_cast<ssize_t>(input.size())) {
      Die(absl::StrCat(path_, " cannot be written"));
    }
    // A copy of its own, whose end a sanitizer knows.
    const std::vector<uint8_t> bytes(input.begin(), input.end());
    Require(LLVMFuzzerTestOneInput(bytes.data(), bytes.size()) == 0,
            "a target returns 0");
  }

 private:
  std::string path_;
  int fd_;
};

void LimitMemory() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  const rlimit limit = {kMemoryBytesMax, kMemoryBytesMax};
  if (::setrlimit(RLIMIT_DATA, &limit) != 0) Die("setrlimit failed");
#endif
}

int Main(int argc, char** argv) {
  const Arguments arguments = Parse(argc, argv);
  // A target's many refusals are not worth their lines.
  spdlog::set_level(spdlog::level::off);
  google::protobuf::SetLogHandler(nullptr);
  LimitMemory();
  if (arguments.write_seeds) {
    WriteSeeds(arguments.corpus);
    return 0;
  }
  std::vector<std::string> inputs = Seeds();
  const size_t seeds = inputs.size();
  for (std::string& input : ReadCorpus(arguments.corpus)) {
    inputs.push_back(std::move(input));
  }
  const CurrentInput current;
  std::printf(
      "%zu seeds, %zu files, %lu mutations of them by seed %lu; %s\n", seeds,
      inputs.size() - seeds, arguments.mutations, arguments.seed,
      absl::StrCat("the input being run is in ", current.path()).c_str());
  std::fflush(stdout);
  for (const std::string& input : inputs) current.Run(input);
  inputs.emplace_back();
  Mutator mutator(arguments.seed);
  for (uint64_t i = 0; i < arguments.mutations; ++i) {
    current.Run(mutator.Mutate(inputs));
  }
  return 0;
}

}  // namespace
}  // namespace optstate::fuzz

int main(int argc, char** argv) { return optstate::fuzz::Main(argc, argv); }
