#include "client/ctl/nodes_compare.h"

#include <map>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

using Differences = std::map<std::string, std::string>;

v1::Job JobAt(uint64_t step) {
  v1::Job job;
  job.set_name("gpt");
  job.set_phase(v1::JOB_PHASE_READY);
  job.set_optimizer(v1::OPTIMIZER_KIND_ADAMW);
  job.set_world_size(2);
  job.set_session_count(2);
  job.set_committed_step(step);
  return job;
}

NodeJobs Node(const v1::Job& first, const v1::Job& second) {
  NodeJobs node;
  *node.first.add_jobs() = first;
  *node.second.add_jobs() = second;
  return node;
}

NodeJobs Node(const v1::Job& job) { return Node(job, job); }

TEST(NodesCompareTest, NodesAtOneStepDoNotDiffer) {
  EXPECT_EQ(FindDifferences({}), Differences());
  EXPECT_EQ(FindDifferences({Node(JobAt(7))}), Differences());
  EXPECT_EQ(FindDifferences({Node(JobAt(7)), Node(JobAt(7))}), Differences());
}

// The nodes are asked one after the other while they take steps.
TEST(NodesCompareTest, StepsThatAreTakenMeanwhileDoNotCount) {
  EXPECT_EQ(
      FindDifferences({Node(JobAt(7), JobAt(12)), Node(JobAt(11), JobAt(13))}),
      Differences());
  EXPECT_EQ(
      FindDifferences({Node(JobAt(7), JobAt(9)), Node(JobAt(10), JobAt(13))}),
      Differences());  // one step apart
  EXPECT_EQ(
      FindDifferences({Node(JobAt(7), JobAt(9)), Node(JobAt(11), JobAt(13))}),
      (Differences{{"gpt", "steps 9 and 11"}}));
}

TEST(NodesCompareTest, WithoutRanksOneStepCounts) {
  v1::Job behind = JobAt(7);
  v1::Job ahead = JobAt(8);
  EXPECT_EQ(FindDifferences({Node(behind), Node(ahead)}), Differences());
  behind.set_session_count(0);
  ahead.set_session_count(0);
  EXPECT_EQ(FindDifferences({Node(ahead), Node(behind)}),
            (Differences{{"gpt", "steps 7 and 8"}}));
}

TEST(NodesCompareTest, PhasesAndSettingsAreNamed) {
  v1::Job failed = JobAt(7);
  failed.set_phase(v1::JOB_PHASE_FAILED);
  EXPECT_EQ(FindDifferences({Node(JobAt(7)), Node(failed)}),
            (Differences{{"gpt", "phases failed and ready"}}));
  EXPECT_EQ(FindDifferences({Node(failed), Node(JobAt(7), failed)}),
            Differences());  // it has changed just now
  v1::Job other = JobAt(9);
  other.set_world_size(3);
  other.set_uid(1000);
  EXPECT_EQ(FindDifferences({Node(JobAt(7)), Node(other)}),
            (Differences{{"gpt",
                          "steps 7 and 9, numbers of ranks 2 and 3, owners 0 "
                          "and 1000"}}));
}

TEST(NodesCompareTest, UnknownValuesAreComparedWithNothing) {
  v1::Job silent;
  silent.set_name("gpt");
  silent.set_state_unknown(true);
  silent.set_ranks_unknown(true);
  EXPECT_EQ(FindDifferences({Node(JobAt(7)), Node(silent)}), Differences());
  v1::Job another = JobAt(1);
  another.set_name("bert");
  EXPECT_EQ(FindDifferences({Node(JobAt(7)), Node(another)}), Differences());
}

}  // namespace
}  // namespace optstate::ctl
