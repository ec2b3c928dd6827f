// A whole job whose engine died, with one of its files changed: it is opened
// anew, and used if that works. Input: a byte that says which job (in memory,
// on a disk), a byte that says which of its files, a byte of flags (1: the file
// ends behind the change, 2: the checksums of `control` are made right), two
// bytes: where the change begins, the bytes of the change.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/types/span.h"
#include "optstate/v1/admin.pb.h"
#include "server/session/testing/job_harness.h"
#include "storage/format/checksum.h"
#include "storage/format/control_file.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace optstate::fuzz {
namespace {

constexpr uint8_t kCut = 1;
constexpr uint8_t kRightChecksums = 2;
constexpr uint64_t kSubGroupElements = 4096;

session::JobHarness::Setup SetupOf(bool on_disk) {
  session::JobHarness::Setup setup;
  setup.layout.groups.resize(2);
  setup.layout.parameters = {session::MakeParameter("a", 5000),
                             session::MakeParameter("b", 77, 1)};
  setup.workers = 1;
  setup.subgroup_elements = kSubGroupElements;
  setup.io_engine = v1::IO_ENGINE_KIND_BLOCKING;
  setup.client_instance = 1;
  if (on_disk) {
    setup.storage.set_placement(v1::PLACEMENT_NVME);
    setup.storage.set_durability(v1::DURABILITY_KIND_STEP);
  }
  return setup;
}

session::CommitSpec CommitOf(uint64_t step,
                             const std::vector<Hyperparams>& groups) {
  session::CommitSpec spec;
  spec.step = step;
  spec.groups = groups;
  return spec;
}

// A job with two steps behind it and a third one prepared, its files, and what
// is to be done to each before the next input.
class Victim {
 public:
  explicit Victim(bool on_disk) : harness_(SetupOf(on_disk)) {
    groups_.assign(2, DefaultHyperparams(harness_.layout().optimizer()));
    harness_.Start(harness_.RandomTensors(1));
    for (uint64_t step = 1; step <= 2; ++step) {
      harness_.Step(step, harness_.RandomTensors(step + 1),
                    CommitOf(step, groups_));
    }
    harness_.SetGradients(harness_.RandomTensors(9));
    harness_.PushAll(3);
    session::CommitSpec prepared = CommitOf(3, groups_);
    prepared.two_phase = true;
    harness_.CommitAll(prepared);
    harness_.Close();
    for (const std::string& root : {harness_.directory(), harness_.disk()}) {
      Read(root);
    }
  }

  size_t FileCount() const { return files_.size(); }
  // Returns the number of the file of this name; the first, if there is none.
  uint8_t FileNamed(absl::string_view name) const {
    for (size_t i = 0; i < files_.size(); ++i) {
      if (absl::EndsWith(files_[i].path, name)) return static_cast<uint8_t>(i);
    }
    return 0;
  }

  void Open(uint8_t file, uint8_t flags, size_t at, absl::string_view bytes) {
    Restore();
    Change(files_[file % files_.size()], flags, at, bytes);
    if (!harness_.Open().ok()) return;
    Use();
    harness_.Close();
  }

 private:
  struct File {
    std::string path;
    std::string content;
  };

  void Read(const std::string& root) {
    for (const auto& entry :
         std::filesystem::recursive_directory_iterator(root)) {
      if (!entry.is_regular_file()) continue;
      std::ifstream stream(entry.path(), std::ios::binary);
      files_.push_back({entry.path().string(),
                        {std::istreambuf_iterator<char>(stream), {}}});
    }
    std::sort(files_.begin(), files_.end(),
              [](const File& a, const File& b) { return a.path < b.path; });
  }

  // Makes the folders what they were, without what the last engine made.
  void Restore() const {
    for (const std::string& root : {harness_.directory(), harness_.disk()}) {
      for (const auto& entry : std::filesystem::directory_iterator(root)) {
        std::filesystem::remove_all(entry.path());
      }
    }
    for (const File& file : files_) {
      std::filesystem::create_directories(
          std::filesystem::path(file.path).parent_path());
      Write(file.path, file.content);
    }
  }

  static void Write(const std::string& path, absl::string_view content) {
    std::ofstream stream(path, std::ios::binary | std::ios::trunc);
    stream << content;
    stream.close();
    Require(static_cast<bool>(stream), "a file of the job can be written");
  }

  static void Change(const File& file, uint8_t flags, size_t at,
                     absl::string_view bytes) {
    std::string content = file.content;
    at = std::min(at, content.size());
    content.replace(at, std::min(bytes.size(), content.size() - at),
                    bytes.data(), bytes.size());
    if ((flags & kCut) != 0) content.resize(at + bytes.size());
    if ((flags & kRightChecksums) != 0 &&
        absl::EndsWith(file.path, "/control") &&
        content.size() >= sizeof(storage::ControlFile)) {
      MakeRight(&content);
    }
    Write(file.path, content);
  }

  // Makes the checksums of a control file's records right.
  static void MakeRight(std::string* content) {
    for (const size_t record : {192, 192 + 128}) {
      const uint32_t crc = storage::Crc32c(content->data() + record, 124);
      std::memcpy(content->data() + record + 124, &crc, sizeof(crc));
    }
  }

  // Does what a rank does, as far as the job lets it.
  void Use() {
    session::Job& job = harness_.job();
    (void)job.Describe();
    (void)job.Position().status();
    if (!harness_.Register(0).ok() || !harness_.Attach(0).ok()) return;
    std::vector<std::byte> values(5000 * sizeof(float));
    (void)job.Fetch(v1::STATE_ARRAY_MASTER, 0, 0, 5000, absl::MakeSpan(values))
        .status();
    const auto position = job.Position();
    if (!position.ok()) return;
    const uint64_t step = position->committed_step + 1;
    if (!harness_.Push(0, step, 0, 2).ok()) return;
    harness_.Commit(0, CommitOf(step, groups_));
    (void)job.Describe();
  }

  session::JobHarness harness_;
  std::vector<Hyperparams> groups_;
  std::vector<File> files_;
};

Victim& VictimOf(bool on_disk) {
  static Victim* const victims[] = {new Victim(false), new Victim(true)};
  return *victims[on_disk ? 1 : 0];
}

std::string Input(bool on_disk, absl::string_view file, uint8_t flags,
                  uint16_t at, const std::string& bytes) {
  return FuzzBytes(static_cast<uint8_t>(on_disk)) +
         FuzzBytes(VictimOf(on_disk).FileNamed(file)) + FuzzBytes(flags) +
         FuzzBytes(at) + bytes;
}

}  // namespace

std::vector<std::string> Seeds() {
  const std::string three = FuzzBytes(uint64_t{3});
  std::vector<std::string> seeds;
  for (const bool on_disk : {false, true}) {
    // The engine died in step 3, after speculating about it, while it had an
    // update and a sum in flight.
    seeds.push_back(Input(on_disk, "/control", kRightChecksums, 72, three));
    seeds.push_back(Input(on_disk, "/control", kRightChecksums, 136, three));
    seeds.push_back(Input(on_disk, "/undo", 0, 0,
                          FuzzBytes(uint64_t{1}) + FuzzBytes(uint64_t{0})));
    seeds.push_back(Input(on_disk, "/step_intent", 0, 136, "\1"));
    seeds.push_back(Input(on_disk, "/job.binpb", kCut, 100, ""));
    seeds.push_back(Input(on_disk, "/rank_marks", 0, 40, three));
    seeds.push_back(Input(on_disk, "/run_stamps.u64", 0, 0, three));
  }
  for (const char* file : {"/commits", "/records", "/identity", "/memory",
                           "/owner", "/frames", "/frame_table", "/verified"}) {
    seeds.push_back(Input(true, file, kCut, 16, three));
    seeds.push_back(Input(true, file, 0, 0, three));
  }
  return seeds;
}

}  // namespace optstate::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace optstate::fuzz;
  FuzzInput input(data, size);
  const bool on_disk = input.Take<uint8_t>() % 2 != 0;
  const auto file = input.Take<uint8_t>();
  const auto flags = input.Take<uint8_t>();
  const size_t at = input.Take<uint16_t>();
  VictimOf(on_disk).Open(file, flags, at, input.rest());
  return 0;
}
