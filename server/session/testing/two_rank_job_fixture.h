#ifndef OPTSTATE_SERVER_SESSION_TESTING_TWO_RANK_JOB_FIXTURE_H_
#define OPTSTATE_SERVER_SESSION_TESTING_TWO_RANK_JOB_FIXTURE_H_

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {

// Tests of how a job is registered: a small layout, and one that extends it, of
// two ranks.
class TwoRankJobFixture : public ::testing::Test {
 protected:
  static LayoutSpec SmallLayout() {
    LayoutSpec spec;
    spec.groups = {{}};
    spec.parameters = {MakeParameter("a", 6000),
                       MakeParameter("b", 9000, 0, DType::kBFloat16)};
    return spec;
  }
  static LayoutSpec ExtendedLayout() {
    LayoutSpec spec = SmallLayout();
    spec.groups.push_back({true});
    spec.parameters.push_back(MakeParameter("c", 5000, 1));
    return spec;
  }
  static JobHarness::Setup TwoRanks() {
    JobHarness::Setup setup;
    setup.layout = SmallLayout();
    setup.world_size = 2;
    return setup;
  }
  static CommitSpec CommitOf(uint64_t step,
                             const std::vector<Hyperparams>& groups) {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups;
    return spec;
  }

  JobHarness harness_{TwoRanks()};
  const std::vector<Hyperparams> groups_ =
      std::vector<Hyperparams>(1, AdamHyperparams());
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_TWO_RANK_JOB_FIXTURE_H_
