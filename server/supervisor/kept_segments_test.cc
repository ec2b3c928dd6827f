#include "server/supervisor/kept_segments.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>

namespace optstate::supervisor {
namespace {

KeptSegment Segment(uint32_t rank) {
  KeptSegment kept;
  kept.info.set_rank(rank);
  kept.segment =
      std::make_shared<const UniqueFd>(::memfd_create("kept", MFD_CLOEXEC));
  return kept;
}

TEST(KeptSegmentsTest, TheNextBuildInheritsEachRankOfEachJob) {
  const KeptByJob kept = {{"a", {{0, Segment(0)}, {3, Segment(3)}}},
                          {"b", {{0, Segment(0)}}}};
  v1::SupervisorHandover handover;
  HandOverKept(kept, &handover);
  ASSERT_EQ(handover.kept_size(), 3);
  EXPECT_EQ(handover.kept(1).fd(), kept.at("a").at(3).segment->get());
  // In one process both builds would close the same fds.
  for (auto& one : *handover.mutable_kept()) one.set_fd(::dup(one.fd()));

  const KeptByJob inherited = InheritKept(handover);
  ASSERT_EQ(inherited.size(), 2u);
  EXPECT_EQ(inherited.at("a").size(), 2u);
  EXPECT_EQ(inherited.at("b").size(), 1u);
  EXPECT_EQ(inherited.at("a").at(3).info.rank(), 3u);
  EXPECT_EQ(inherited.at("a").at(3).segment->get(), handover.kept(1).fd());
}

TEST(KeptSegmentsTest, NothingIsKeptWithoutJobs) {
  EXPECT_TRUE(InheritKept({}).empty());
  v1::SupervisorHandover handover;
  HandOverKept({}, &handover);
  EXPECT_EQ(handover.kept_size(), 0);
}

}  // namespace
}  // namespace optstate::supervisor
