// Tests a rank against an engine that breaks the protocol: no value that the
// engine wrote is trusted. The engine is a thread that follows the test's
// script.

#include "client/channel/shm/shm_channel.h"

#include <sys/mman.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "client/channel/shm/fake_shm_engine.h"
#include "client/channel/transport_error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::client {
namespace {

using testing::HasSubstr;

class ShmChannelTest : public testing::Test {
 protected:
  // Makes a channel to an engine that runs `script`.
  ShmChannel* ChannelTo(std::function<void(FakeShmEngine&)> script) {
    daemon_ = std::make_unique<FakeShmDaemon>(std::move(script));
    channel_ = std::make_unique<ShmChannel>(daemon_->endpoint(), SetupOfTest());
    return channel_.get();
  }

  // Returns the result of Connect to an engine that runs `script`.
  absl::Status ConnectTo(std::function<void(FakeShmEngine&)> script) {
    ShmChannel* const channel = ChannelTo(std::move(script));
    absl::Status status = channel->Connect(false, Soon()).status();
    EXPECT_EQ(channel->connected(), status.ok());
    return status;
  }

  // Returns the result of a push and a flush after a connect.
  absl::Status FlushTo(const std::function<void(FakeShmEngine&)>& script) {
    const absl::Status connected = ConnectTo([script](FakeShmEngine& engine) {
      engine.Admit();
      script(engine);
    });
    EXPECT_TRUE(connected.ok()) << connected;
    absl::Status status = channel_->Push({.step = 1,
                                          .micro_step = 0,
                                          .first_parameter = 0,
                                          .parameter_count = 1},
                                         Soon());
    if (status.ok()) status = channel_->Flush(Soon());
    return status;
  }

  std::unique_ptr<FakeShmDaemon> daemon_;
  std::unique_ptr<ShmChannel> channel_;  // destroyed before its daemon
};

TEST_F(ShmChannelTest, AnswersArriveWithTheirText) {
  const absl::Status status = FlushTo([](FakeShmEngine& engine) {
    const Submission push = engine.Take();
    EXPECT_EQ(push.op, static_cast<uint16_t>(shm::Op::kPush));
    EXPECT_EQ(push.numel, 1);
    Completion refusal = {};
    refusal.request_id = push.request_id;
    refusal.status = static_cast<uint32_t>(absl::StatusCode::kDataLoss);
    refusal.text_bytes = 3;
    engine.Answer(refusal, "bad");
  });
  EXPECT_TRUE(status.ok()) << status;
  ASSERT_TRUE(channel_->failed_push().has_value());
  EXPECT_EQ(channel_->failed_push()->status, absl::DataLossError("bad"));
}

TEST_F(ShmChannelTest, WrongMagic) {
  EXPECT_THAT(ConnectTo([](FakeShmEngine& engine) {
                engine.header()->magic = 1;
                engine.Admit();
              }).message(),
              HasSubstr("magic"));
}

TEST_F(ShmChannelTest, OtherSegmentVersion) {
  const absl::Status status = ConnectTo([](FakeShmEngine& engine) {
    engine.header()->version = 7;
    engine.Admit();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("version 7"));
}

TEST_F(ShmChannelTest, OtherAreaSize) {
  EXPECT_THAT(ConnectTo([](FakeShmEngine& engine) {
                engine.header()->parameter_area_bytes = 1 << 20;
                engine.Admit();
              }).message(),
              HasSubstr("1048576"));
}

TEST_F(ShmChannelTest, UnsealedSegment) {
  const absl::Status status = ConnectTo([](FakeShmEngine& engine) {
    const UniqueFd unsealed(memfd_create("unsealed", MFD_CLOEXEC));
    ASSERT_EQ(ftruncate(unsealed.get(), CompletionSegmentLayout::kSegmentBytes),
              0);
    engine.Admit({unsealed.get(), engine.parameters.readable.get()});
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(status.message(), HasSubstr("completion segment"));
}

TEST_F(ShmChannelTest, SegmentOfAnotherSize) {
  const absl::Status status = ConnectTo([](FakeShmEngine& engine) {
    const FakeStateFile other(4096 * 2);
    engine.Admit({engine.completions.fd(), other.readable.get()});
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(status.message(), HasSubstr("parameter file"));
}

TEST_F(ShmChannelTest, RunStampsOfAnotherSize) {
  const absl::Status status = ConnectTo([](FakeShmEngine& engine) {
    const FakeStateFile other(4096 * 2);
    engine.Admit({engine.completions.fd(), engine.parameters.readable.get(),
                  other.readable.get()});
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(status.message(), HasSubstr("run stamps"));
}

// An older engine has no run stamps.
TEST_F(ShmChannelTest, EngineWithoutRunStamps) {
  EXPECT_TRUE(ConnectTo([](FakeShmEngine& engine) {
                engine.Admit({engine.completions.fd(),
                              engine.parameters.readable.get()});
              }).ok());
  EXPECT_EQ(channel_->run_stamps(), nullptr);
}

TEST_F(ShmChannelTest, MissingSegments) {
  EXPECT_THAT(ConnectTo([](FakeShmEngine& engine) {
                engine.Admit({engine.completions.fd()});
              }).message(),
              HasSubstr("1 segments"));
}

TEST_F(ShmChannelTest, AnswerToNobody) {
  const absl::Status status = FlushTo([](FakeShmEngine& engine) {
    Completion answer = {};
    answer.request_id = engine.Take().request_id + 5;
    engine.Answer(answer);
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  EXPECT_FALSE(channel_->connected());
}

TEST_F(ShmChannelTest, AnswerTwice) {
  const absl::Status status = FlushTo([](FakeShmEngine& engine) {
    Completion answer = {};
    answer.request_id = engine.Take().request_id;
    engine.Answer(answer);
    engine.Answer(answer);
    engine.Take();
  });
  // The second answer may be seen in this call or the next one.
  absl::Status next = channel_->Abort(1, Soon());
  EXPECT_FALSE(status.ok() && next.ok());
  EXPECT_FALSE(channel_->connected());
}

TEST_F(ShmChannelTest, ImpossibleTail) {
  const absl::Status status = FlushTo([](FakeShmEngine& engine) {
    engine.Take();
    engine.header()->ring.produced_tail.store(uint64_t{1} << 60);
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_FALSE(channel_->connected());
}

TEST_F(ShmChannelTest, TextLongerThanItsSlot) {
  const absl::Status status = FlushTo([](FakeShmEngine& engine) {
    Completion answer = {};
    answer.request_id = engine.Take().request_id;
    answer.status = 999;
    answer.text_bytes = 0xffffffff;
    engine.Answer(answer, std::string(shm::kTextBytes, 'x'));
  });
  EXPECT_TRUE(status.ok()) << status;
  ASSERT_TRUE(channel_->failed_push().has_value());
  EXPECT_EQ(channel_->failed_push()->status.message(),
            std::string(shm::kTextBytes, 'x'));
  EXPECT_EQ(channel_->failed_push()->status.code(), absl::StatusCode::kUnknown);
}

TEST_F(ShmChannelTest, DeathIsATransportError) {
  const absl::Status status =
      FlushTo([](FakeShmEngine& engine) { engine.Take(); });
  EXPECT_TRUE(IsTransportError(status)) << status;
  EXPECT_FALSE(channel_->connected());
}

// An answer given by the engine before it died counts.
TEST_F(ShmChannelTest, LastAnswerBeforeDeath) {
  const absl::Status status = FlushTo([](FakeShmEngine& engine) {
    Completion answer = {};
    answer.request_id = engine.Take().request_id;
    engine.Answer(answer);
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(ShmChannelTest, ReasonOfAnEnd) {
  absl::Status status = FlushTo([](FakeShmEngine& engine) {
    engine.Take();
    engine.Farewell(absl::InvalidArgumentError("ring index out of range"));
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(status.message(), HasSubstr("ring index out of range"));
  EXPECT_FALSE(channel_->connected());
}

TEST_F(ShmChannelTest, ShutdownIsWorthAnotherTry) {
  const absl::Status status = FlushTo([](FakeShmEngine& engine) {
    engine.Take();
    engine.Farewell(absl::UnavailableError("optstated shuts down"));
  });
  EXPECT_TRUE(IsTransportError(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("shuts down"));
}

TEST_F(ShmChannelTest, MemoryOfADeviceComesWithItsTable) {
  ShmChannel* const channel = ChannelTo([](FakeShmEngine& engine) {
    engine.shares_parameters = true;
    engine.Admit();
    v1::ShareParametersReply reply;
    reply.set_device_index(4);
    reply.set_memory_bytes(8192);
    EXPECT_EQ(engine.AnswerShareParameters(
                  reply, {engine.completions.fd(), engine.completions.fd()}),
              "gpu-1");
    reply.Clear();
    *reply.mutable_refused() =
        ToProto(absl::NotFoundError("nothing stays there"));
    engine.AnswerShareParameters(reply, {});
    engine.TakeDetach();
  });
  ASSERT_TRUE(channel->Connect(false, Soon()).ok());
  const auto shared = channel->ShareParameters("gpu-1", Soon());
  ASSERT_TRUE(shared.ok()) << shared.status();
  EXPECT_TRUE(shared->table.ok());
  EXPECT_TRUE(shared->memory.ok());
  EXPECT_EQ(shared->device_index, 4u);
  EXPECT_EQ(shared->memory_bytes, 8192u);
  const absl::Status refused =
      channel->ShareParameters("gpu-2", Soon()).status();
  EXPECT_TRUE(absl::IsNotFound(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("nothing stays there"));
  EXPECT_TRUE(channel->connected());
  EXPECT_TRUE(channel->Disconnect().ok());
}

TEST_F(ShmChannelTest, AnEarlierEngineIsNotAskedForMemoryOfADevice) {
  ShmChannel* const channel = ChannelTo([](FakeShmEngine& engine) {
    engine.Admit();
    engine.TakeDetach();
  });
  ASSERT_TRUE(channel->Connect(false, Soon()).ok());
  const absl::Status refused =
      channel->ShareParameters("gpu-1", Soon()).status();
  EXPECT_TRUE(absl::IsUnimplemented(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("earlier build"));
  EXPECT_TRUE(channel->Disconnect().ok());
}

TEST_F(ShmChannelTest, MemoryWithoutATableEndsTheConnection) {
  ShmChannel* const channel = ChannelTo([](FakeShmEngine& engine) {
    engine.shares_parameters = true;
    engine.Admit();
    engine.AnswerShareParameters({}, {engine.completions.fd()});
  });
  ASSERT_TRUE(channel->Connect(false, Soon()).ok());
  const absl::Status wrong = channel->ShareParameters("gpu-1", Soon()).status();
  EXPECT_TRUE(absl::IsInternal(wrong)) << wrong;
  EXPECT_FALSE(channel->connected());
}

TEST_F(ShmChannelTest, GradientsOnADeviceAreOfferedWithTheirTable) {
  ShmChannel* const channel = ChannelTo([](FakeShmEngine& engine) {
    engine.shares_gradients = true;
    engine.Admit();
    size_t fds = 0;
    v1::SessionReply reply;
    reply.mutable_share_gradients();
    v1::ShareGradientsRequest offer = engine.AnswerShareGradients(reply, &fds);
    EXPECT_EQ(offer.device(), "gpu-1");
    EXPECT_EQ(offer.memory_bytes(), 8192u);
    EXPECT_EQ(fds, 2u);
    *reply.mutable_share_gradients()->mutable_refused() =
        ToProto(absl::NotFoundError("nothing stays there"));
    engine.AnswerShareGradients(reply, &fds);
    reply.mutable_share_gradients()->clear_refused();
    offer = engine.AnswerShareGradients(reply, &fds);
    EXPECT_EQ(offer.memory_bytes(), 0u);
    EXPECT_EQ(fds, 0u);
    engine.TakeDetach();
  });
  ASSERT_TRUE(channel->Connect(false, Soon()).ok());
  const Channel::GradientsOffer offer = {
      .table = 1, .memory = 2, .memory_bytes = 8192};
  const absl::Status taken = channel->ShareGradients("gpu-1", offer, Soon());
  EXPECT_TRUE(taken.ok()) << taken;
  const absl::Status refused = channel->ShareGradients("gpu-1", offer, Soon());
  EXPECT_TRUE(absl::IsNotFound(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("nothing stays there"));
  EXPECT_TRUE(
      channel->ShareGradients("", Channel::GradientsOffer(), Soon()).ok());
  EXPECT_TRUE(channel->connected());
  EXPECT_TRUE(channel->Disconnect().ok());
}

TEST_F(ShmChannelTest, AnEarlierEngineIsOfferedNoGradients) {
  ShmChannel* const channel = ChannelTo([](FakeShmEngine& engine) {
    engine.shares_parameters = true;
    engine.Admit();
    engine.TakeDetach();
  });
  ASSERT_TRUE(channel->Connect(false, Soon()).ok());
  const absl::Status refused = channel->ShareGradients(
      "gpu-1", {.table = 1, .memory = 2, .memory_bytes = 8192}, Soon());
  EXPECT_TRUE(absl::IsUnimplemented(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("earlier build"));
  EXPECT_TRUE(channel->Disconnect().ok());
}

TEST_F(ShmChannelTest, AnAnswerToSomethingElseEndsTheConnection) {
  ShmChannel* const channel = ChannelTo([](FakeShmEngine& engine) {
    engine.shares_gradients = true;
    engine.Admit();
    size_t fds = 0;
    engine.AnswerShareGradients({}, &fds);
  });
  ASSERT_TRUE(channel->Connect(false, Soon()).ok());
  const absl::Status wrong = channel->ShareGradients(
      "gpu-1", {.table = 1, .memory = 2, .memory_bytes = 8192}, Soon());
  EXPECT_TRUE(absl::IsInternal(wrong)) << wrong;
  EXPECT_FALSE(channel->connected());
}

}  // namespace
}  // namespace optstate::client
