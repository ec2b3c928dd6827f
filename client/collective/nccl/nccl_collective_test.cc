// Tests the calls of NCCL, its errors, hangs and aborts, over its fake.

#include "client/collective/nccl/nccl_collective.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/collective/nccl/nccl_api.h"
#include "client/collective/testing/elements.h"
#include "client/collective/testing/fake_nccl.h"
#include "client/collective/testing/memory_store.h"
#include "client/collective/testing/ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::client {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr absl::Duration kShort = absl::Milliseconds(200);

class NcclCollectiveTest : public testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<FakeNccl> fake = FakeNccl::Open();
    ASSERT_TRUE(fake.ok()) << fake.status();
    fake_ = std::make_unique<FakeNccl>(*std::move(fake));
  }

  static NcclOptions OptionsOf(uint32_t rank, uint32_t world_size,
                               absl::Duration timeout) {
    NcclOptions options;
    options.rank = rank;
    options.world_size = world_size;
    options.library = kFakeNcclPath;
    options.connect_timeout = kPatience;
    options.timeout = timeout;
    return options;
  }

  Collectives Make(uint32_t ranks, absl::Duration timeout = kPatience) {
    MemoryStore store;
    absl::StatusOr<Collectives> all = MakeRanks(ranks, [&](uint32_t rank) {
      return MakeNcclCollective(OptionsOf(rank, ranks, timeout), &store,
                                fake_->MakeQueue());
    });
    EXPECT_TRUE(all.ok()) << all.status();
    return all.ok() ? *std::move(all) : Collectives();
  }

  static absl::Status Sum(Collective& each) {
    std::vector<std::byte> bytes =
        Elements(ElementType::kFloat32, 3, [](size_t) { return 1; });
    return each.AllReduce(ElementType::kFloat32, bytes, absl::MakeSpan(bytes));
  }

  std::unique_ptr<FakeNccl> fake_;
};

TEST_F(NcclCollectiveTest, CallsHaveTheirOrderAndSizes) {
  {
    const Collectives all = Make(2);
    const std::vector<absl::Status> results =
        OnRanks(all, [](Collective& each) {
          std::vector<std::byte> a(24);
          std::vector<std::byte> b(48);
          const absl::Span<std::byte> in = absl::MakeSpan(a);
          const absl::Span<std::byte> twice = absl::MakeSpan(b);
          absl::Status status = each.AllReduce(ElementType::kFloat64, in, in);
          status.Update(each.ReduceScatter(ElementType::kBFloat16, twice, in));
          status.Update(each.Reduce(ElementType::kUint8, 1, in, in));
          status.Update(each.AllGather(in, twice));
          status.Update(each.Broadcast(1, twice));
          status.Update(each.Barrier());
          status.Update(each.AllReduceEach(ElementType::kFloat32,
                                           {{in, in}, {twice, twice}}));
          return status;
        });
    for (const absl::Status& each : results) EXPECT_TRUE(each.ok()) << each;
  }
  for (const int rank : {0, 1}) {
    EXPECT_THAT(fake_->Calls(rank),
                ElementsAre("ncclCommInitRankConfig ranks=2",
                            "ncclAllReduce count=3 type=8 op=0",
                            "ncclReduceScatter count=12 type=9 op=0",
                            "ncclReduce count=24 type=1 root=1",
                            "ncclAllGather count=24 type=1",
                            "ncclBroadcast count=48 type=1 root=1",
                            "ncclAllReduce count=1 type=1 op=0",
                            "ncclAllReduce count=6 type=7 op=0",
                            "ncclAllReduce count=12 type=7 op=0",
                            "ncclCommFinalize", "ncclCommDestroy"));
  }
  EXPECT_EQ(fake_->OpenCommunicators(), 0);
}

TEST_F(NcclCollectiveTest, AnAsynchronousErrorAbortsTheCommunicator) {
  {
    const Collectives all = Make(2, kShort);
    fake_->FailAsync(1, nccl::kRemoteError);
    fake_->Hang(1);  // it never reaches rank 0
    const std::vector<absl::Status> results = OnRanks(all, &Sum);
    EXPECT_TRUE(absl::IsDeadlineExceeded(results[0])) << results[0];
    EXPECT_TRUE(absl::IsUnavailable(results[1])) << results[1];
    EXPECT_THAT(std::string(results[1].message()),
                HasSubstr("remote process exited"));
    EXPECT_EQ(fake_->Calls(1).back(), "ncclCommAbort");
    EXPECT_EQ(Sum(*all[1]), results[1]);
    EXPECT_EQ(fake_->OpenCommunicators(), 0);
  }
  EXPECT_EQ(fake_->Calls(0).back(), "ncclCommAbort");
}

TEST_F(NcclCollectiveTest, AHangEndsAtTheTimeOut) {
  const Collectives all = Make(3, kShort);
  fake_->Hang(2);
  const std::vector<absl::Status> results = OnRanks(all, &Sum);
  for (const absl::Status& each : results) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(each)) << each;
    EXPECT_THAT(std::string(each.message()),
                HasSubstr("ncclAllReduce (operation 1)"));
  }
  EXPECT_EQ(fake_->OpenCommunicators(), 0);
}

TEST_F(NcclCollectiveTest, AToldAbortEndsTheOthersAtOnce) {
  const Collectives all = Make(3);
  fake_->TellOfAborts();
  const std::vector<absl::Status> results = OnRanks(all, [](Collective& each) {
    if (each.rank() != 0) return Sum(each);
    each.Abort("out of memory");
    return each.failure();
  });
  EXPECT_TRUE(absl::IsAborted(results[0])) << results[0];
  EXPECT_TRUE(absl::IsUnavailable(results[1])) << results[1];
  EXPECT_TRUE(absl::IsUnavailable(results[2])) << results[2];
  EXPECT_EQ(fake_->OpenCommunicators(), 0);
}

TEST_F(NcclCollectiveTest, AFailedCallAbortsTheCommunicator) {
  for (const char* const function :
       {"ncclAllReduce", "ncclReduceScatter", "ncclReduce", "ncclAllGather",
        "ncclBroadcast"}) {
    fake_->Reset();
    const Collectives all = Make(1);
    ASSERT_EQ(all.size(), 1u);
    fake_->FailCall(function, 0, nccl::kUnhandledCudaError);
    std::vector<std::byte> bytes(8);
    const absl::Span<std::byte> span = absl::MakeSpan(bytes);
    const auto type = ElementType::kFloat32;
    absl::Status status = all[0]->AllReduce(type, span, span);
    status.Update(all[0]->ReduceScatter(type, span, span));
    status.Update(all[0]->Reduce(type, 0, span, span));
    status.Update(all[0]->AllGather(span, span));
    status.Update(all[0]->Broadcast(0, span));
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(function));
    EXPECT_EQ(fake_->Calls(0).back(), "ncclCommAbort");
    EXPECT_EQ(fake_->OpenCommunicators(), 0);
  }
}

TEST_F(NcclCollectiveTest, DifferentCallsEndAtTheTimeOut) {
  const Collectives all = Make(2, kShort);
  const std::vector<absl::Status> results = OnRanks(all, [](Collective& each) {
    return each.rank() == 0 ? Sum(each) : each.Barrier();
  });
  for (const absl::Status& each : results) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(each)) << each;
  }
}

TEST_F(NcclCollectiveTest, MemoryThatTheDeviceDoesNotReachIsRefused) {
  MemoryStore store;
  std::vector<std::byte> host(8);
  const auto collective = MakeNcclCollective(OptionsOf(0, 1, kPatience), &store,
                                             fake_->MakeQueue(host.data()));
  ASSERT_TRUE(collective.ok()) << collective.status();
  const absl::Status refused =
      (*collective)
          ->AllReduce(ElementType::kFloat32, host, absl::MakeSpan(host));
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  std::vector<std::byte> device(8);
  EXPECT_TRUE(
      (*collective)
          ->AllReduce(ElementType::kFloat32, device, absl::MakeSpan(device))
          .ok());
}

TEST_F(NcclCollectiveTest, MemoryThatTheDeviceReachesInPartIsRefused) {
  MemoryStore store;
  std::vector<std::byte> host(8);
  const auto collective =
      MakeNcclCollective(OptionsOf(0, 1, kPatience), &store,
                         fake_->MakeQueue(host.data() + host.size() - 1));
  ASSERT_TRUE(collective.ok()) << collective.status();
  const absl::Status refused =
      (*collective)
          ->AllReduce(ElementType::kFloat32, host, absl::MakeSpan(host));
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
}

// NCCL may have freed the communicator: an abort would use it again, which ends
// the fake's process.
TEST_F(NcclCollectiveTest, AFailedDestructionIsNotFollowedByAnAbort) {
  {
    const Collectives all = Make(1);
    ASSERT_EQ(all.size(), 1u);
    fake_->FailCall("ncclCommDestroy", 0, nccl::kInternalError);
  }
  EXPECT_EQ(fake_->Calls(0).back(), "ncclCommDestroy");
  EXPECT_EQ(fake_->OpenCommunicators(), 0);
}

TEST_F(NcclCollectiveTest, ARankThatDoesNotComeEndsTheMeeting) {
  MemoryStore store;
  NcclOptions options = OptionsOf(0, 2, kPatience);
  options.connect_timeout = kShort;
  const absl::Status status =
      MakeNcclCollective(options, &store, fake_->MakeQueue()).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_EQ(fake_->OpenCommunicators(), 0);
  options.rank = 1;
  options.name = "nobody";
  const absl::Status alone =
      MakeNcclCollective(options, &store, fake_->MakeQueue()).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(alone)) << alone;
}

TEST_F(NcclCollectiveTest, WhatTheStoreHasIsChecked) {
  const std::string id(256, 'a');
  for (const std::string& text :
       {std::string(), std::string("optstate-nccl-1 2 ") + id.substr(1),
        "optstate-nccl-2 2 " + id, "optstate-nccl-1 x " + id,
        "optstate-nccl-1 2 " + id.substr(1) + "g"}) {
    MemoryStore store;
    ASSERT_TRUE(store.Set("optstate-nccl", text).ok());
    const absl::Status status =
        MakeNcclCollective(OptionsOf(1, 2, kShort), &store, fake_->MakeQueue())
            .status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  }
  MemoryStore store;
  ASSERT_TRUE(store.Set("optstate-nccl", "optstate-nccl-1 3 " + id).ok());
  const absl::Status other =
      MakeNcclCollective(OptionsOf(1, 2, kShort), &store, fake_->MakeQueue())
          .status();
  EXPECT_TRUE(absl::IsFailedPrecondition(other)) << other;
  const absl::Status again =
      MakeNcclCollective(OptionsOf(0, 2, kShort), &store, fake_->MakeQueue())
          .status();
  EXPECT_TRUE(absl::IsAlreadyExists(again)) << again;
}

TEST_F(NcclCollectiveTest, LibrariesThatCannotBeUsedAreRefused) {
  MemoryStore store;
  NcclOptions options = OptionsOf(0, 1, kShort);
  options.library = "/nowhere/libnccl.so.2";
  const absl::Status none =
      MakeNcclCollective(options, &store, fake_->MakeQueue()).status();
  EXPECT_TRUE(absl::IsNotFound(none)) << none;
  EXPECT_THAT(std::string(none.message()), HasSubstr("OPTSTATE_NCCL_LIBRARY"));
  options.library = "libm.so.6";
  const absl::Status other =
      MakeNcclCollective(options, &store, fake_->MakeQueue()).status();
  EXPECT_TRUE(absl::IsUnimplemented(other)) << other;
  options.library = kFakeNcclPath;
  for (const int version : {2804, 21399, 30000}) {
    fake_->SetVersion(version);
    const absl::Status old =
        MakeNcclCollective(options, &store, fake_->MakeQueue()).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(old)) << version << ": " << old;
    if (version == 2804) {
      EXPECT_THAT(std::string(old.message()), HasSubstr("is NCCL 2.8.4,"));
    }
  }
}

}  // namespace
}  // namespace optstate::client
