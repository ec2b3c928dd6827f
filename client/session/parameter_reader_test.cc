#include "client/session/parameter_reader.h"

#include <array>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "client/session/parameter_digests.h"
#include "gtest/gtest.h"
#include "proto/types/random_layout.h"

namespace optstate::client {
namespace {

constexpr uint64_t kStep = 7;

// Parameters of a layout, whose bytes identify their run, and the destinations
// of their copies.
class Parameters {
 public:
  explicit Parameters(const Layout* layout)
      : layout_(layout),
        area_(layout->parameter_area_bytes()),
        stamps_(layout->run_count()) {
    for (uint32_t p = 0; p < layout->parameters().size(); ++p) {
      const ParameterSpec& spec = layout->parameters()[p];
      copies_.emplace_back(
          static_cast<uint64_t>(spec.numel) * SizeInBytes(spec.dtype), kOld);
      for (uint64_t i = 0; i < copies_[p].size(); ++i) {
        area_[layout->parameter_offset_bytes(p) + i] = NewByte(p, i);
      }
      indices_.push_back(p);
    }
    for (auto& copy : copies_) destinations_.push_back(copy.data());
  }

  // Checks that every new byte belongs to a stamped run; with `all`, that all
  // bytes are new.
  void Check(bool all) const {
    for (uint32_t p = 0; p < copies_.size(); ++p) {
      for (uint64_t i = 0; i < copies_[p].size(); ++i) {
        if (copies_[p][i] == kOld) {
          ASSERT_FALSE(all) << p << " " << i;
          continue;
        }
        ASSERT_EQ(copies_[p][i], NewByte(p, i)) << p << " " << i;
        ASSERT_EQ(stamps_[RunOf(p, i)].load(), kStep) << p << " " << i;
      }
    }
  }
  // Checks that each copy is known and that the change of one byte is seen.
  void CheckDigests(const ParameterDigests& digests, RandomLayouts* random) {
    for (uint32_t p = 0; p < copies_.size(); ++p) {
      EXPECT_FALSE(digests.Differs(p, copies_[p].data())) << p;
      if (copies_[p].empty()) continue;
      std::byte& byte = copies_[p][random->Uniform(0, copies_[p].size() - 1)];
      byte ^= std::byte{1};
      EXPECT_TRUE(digests.Differs(p, copies_[p].data())) << p;
      byte ^= std::byte{1};
    }
  }
  void Stamp(uint64_t run, uint64_t step = kStep) { stamps_[run] = step; }
  bool is_new(uint32_t p, uint64_t element) const {
    return copies_[p][element * SizeInBytes(layout_->parameters()[p].dtype)] !=
           kOld;
  }
  const std::atomic<uint64_t>* stamps() const { return stamps_.data(); }
  const std::byte* area() const { return area_.data(); }
  ParameterTargets targets() const {
    return {.parameters = indices_, .destinations = destinations_};
  }

 private:
  static constexpr std::byte kOld{0};

  uint64_t RunOf(uint32_t p, uint64_t byte) const {
    const uint64_t element = byte / SizeInBytes(layout_->parameters()[p].dtype);
    const uint64_t flat = layout_->flat_offset(p);
    return layout_->first_run(p) + (flat + element) / kTileElements -
           flat / kTileElements;
  }
  std::byte NewByte(uint32_t p, uint64_t byte) const {
    return std::byte(1 + (31 * p + 7 * RunOf(p, byte) + byte) % 255);
  }

  const Layout* layout_;
  std::vector<std::byte> area_;
  std::vector<std::atomic<uint64_t>> stamps_;
  std::vector<std::vector<std::byte>> copies_;
  std::vector<uint32_t> indices_;
  std::vector<void*> destinations_;
};

LayoutSpec SpecOf(const std::vector<int64_t>& sizes) {
  LayoutSpec spec{.optimizer = OptimizerKind::kAdamW,
                  .groups = {{.options = 0}},
                  .parameters = {}};
  for (int64_t size : sizes) {
    spec.parameters.push_back(
        {.name = "p" + std::to_string(spec.parameters.size()),
         .shape = {size},
         .numel = size,
         .dtype = DType::kBFloat16,
         .gradient_dtype = DType::kBFloat16,
         .group = 0});
  }
  return spec;
}

TEST(ParameterReaderTest, LargeOnesComeInPieces) {
  constexpr uint64_t kTiles = 3 * 64 + 2;
  const Layout layout =
      *Layout::Make(SpecOf({int64_t{kTiles * kTileElements - 5}}));
  Parameters parameters(&layout);
  ParameterDigests digests(&layout, ChangeDetection::kOff);
  ParameterReader reader(&layout, &digests);
  reader.Begin(kStep, parameters.targets());
  EXPECT_FALSE(reader.CopyReady(parameters.stamps(), parameters.area()));
  EXPECT_FALSE(reader.has_copied());
  for (uint64_t run = 64; run < 128; ++run) {
    EXPECT_FALSE(reader.CopyReady(parameters.stamps(), parameters.area()));
    parameters.Stamp(run);
  }
  EXPECT_TRUE(reader.CopyReady(parameters.stamps(), parameters.area()));
  EXPECT_TRUE(reader.has_copied());
  parameters.Check(/*all=*/false);
  EXPECT_FALSE(parameters.is_new(0, 64 * kTileElements - 1));
  EXPECT_TRUE(parameters.is_new(0, 64 * kTileElements));
  EXPECT_TRUE(parameters.is_new(0, 128 * kTileElements - 1));
  EXPECT_FALSE(parameters.is_new(0, 128 * kTileElements));
  EXPECT_FALSE(reader.done());
  for (uint64_t run = 0; run < kTiles; ++run) parameters.Stamp(run);
  reader.CopyRest(parameters.area());
  EXPECT_TRUE(reader.done());
  parameters.Check(/*all=*/true);
}

TEST(ParameterReaderTest, OtherStepsDoNotCount) {
  const Layout layout = *Layout::Make(SpecOf({100}));
  Parameters parameters(&layout);
  ParameterDigests digests(&layout, ChangeDetection::kOff);
  ParameterReader reader(&layout, &digests);
  reader.Begin(kStep, parameters.targets());
  for (uint64_t step : {kStep - 1, kStep + 1}) {
    parameters.Stamp(0, step);
    EXPECT_FALSE(reader.CopyReady(parameters.stamps(), parameters.area()));
  }
}

TEST(ParameterReaderTest, NoMoreThanIsAskedFor) {
  const Layout layout = *Layout::Make(SpecOf({10, 10, 10}));
  Parameters parameters(&layout);
  for (uint64_t run = 0; run < 3; ++run) parameters.Stamp(run);
  const ParameterTargets all = parameters.targets();
  const std::vector<uint32_t> indices = {2, 0};
  const std::vector<void*> destinations = {all.destinations[2],
                                           all.destinations[0]};
  ParameterDigests digests(&layout, ChangeDetection::kOff);
  ParameterReader reader(&layout, &digests);
  reader.Begin(kStep, {.parameters = indices, .destinations = destinations});
  EXPECT_TRUE(reader.CopyReady(parameters.stamps(), parameters.area()));
  EXPECT_TRUE(reader.done());
  EXPECT_TRUE(parameters.is_new(0, 0));
  EXPECT_FALSE(parameters.is_new(1, 0));
  EXPECT_TRUE(parameters.is_new(2, 0));
  parameters.Check(/*all=*/false);
}

TEST(ParameterReaderTest, PartsWithoutADestinationAreAnnounced) {
  const Layout layout =
      *Layout::Make(SpecOf({int64_t{65 * kTileElements}, 10, 0, 10}));
  Parameters parameters(&layout);
  const ParameterTargets all = parameters.targets();
  std::vector<void*> destinations(4, nullptr);
  destinations[1] = all.destinations[1];
  std::vector<std::array<uint64_t, 3>> told;
  ParameterDigests digests(&layout, ChangeDetection::kExact);
  ParameterReader reader(&layout, &digests);
  reader.Begin(kStep, {.parameters = all.parameters,
                       .destinations = destinations,
                       .ready = [&](uint32_t p, uint64_t begin, uint64_t end) {
                         told.push_back({p, begin, end});
                       }});
  EXPECT_FALSE(reader.CopyReady(parameters.stamps(), parameters.area()));
  EXPECT_TRUE(told.empty());
  for (uint64_t run = 0; run < 64; ++run) parameters.Stamp(run);
  EXPECT_TRUE(reader.CopyReady(parameters.stamps(), parameters.area()));
  EXPECT_TRUE(reader.has_copied());
  using Told = std::vector<std::array<uint64_t, 3>>;
  EXPECT_EQ(told, (Told{{0, 0, 64 * kTileElements}}));
  told.clear();
  for (uint64_t run = 0; run < layout.run_count(); ++run) parameters.Stamp(run);
  reader.CopyRest(parameters.area());
  EXPECT_EQ(told,
            (Told{{0, 64 * kTileElements, 65 * kTileElements}, {3, 0, 10}}));
  EXPECT_TRUE(parameters.is_new(1, 0));
  EXPECT_FALSE(parameters.is_new(0, 0));
}

TEST(ParameterReaderTest, RunsInAnyOrderOfAnyLayout) {
  RandomLayouts random;
  for (int round = 0; round < 20; ++round) {
    LayoutSpec spec = random.Next(40);
    // This parameter is large enough to come in pieces.
    ParameterSpec& large =
        spec.parameters[random.Uniform(0, spec.parameters.size() - 1)];
    large.numel = static_cast<int64_t>(random.Uniform(1, 600000));
    large.shape = {large.numel};
    const Layout layout = *Layout::Make(spec);
    Parameters parameters(&layout);
    std::vector<uint64_t> runs(layout.run_count());
    std::iota(runs.begin(), runs.end(), 0);
    for (size_t i = runs.size(); i > 1; --i) {
      std::swap(runs[i - 1], runs[random.Uniform(0, i - 1)]);
    }
    ParameterDigests digests(&layout, ChangeDetection::kExact);
    ParameterReader reader(&layout, &digests);
    reader.Begin(kStep, parameters.targets());
    for (const uint64_t run : runs) {
      parameters.Stamp(run);
      if (random.Uniform(0, 19) > 0) continue;
      reader.CopyReady(parameters.stamps(), parameters.area());
      parameters.Check(/*all=*/false);
    }
    reader.CopyReady(parameters.stamps(), parameters.area());
    EXPECT_TRUE(reader.done());
    parameters.Check(/*all=*/true);
    parameters.CheckDigests(digests, &random);
  }
}

}  // namespace
}  // namespace optstate::client
