#include "client/collective/tcp/tcp_collective.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/collective/tcp/address_record.h"
#include "client/collective/testing/elements.h"
#include "client/collective/testing/memory_store.h"
#include "client/collective/testing/ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {
namespace {

using testing::HasSubstr;

TcpOptions OptionsOf(uint32_t rank, uint32_t world_size) {
  TcpOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.connect_timeout = kPatience;
  options.timeout = kPatience;
  return options;
}

// Has rank 0 make one call and rank 1 another; returns both errors.
std::vector<absl::Status> Disagree(
    const std::function<absl::Status(Collective&)>& first,
    const std::function<absl::Status(Collective&)>& second) {
  absl::StatusOr<Collectives> all = MakeTcpRanks(2);
  EXPECT_TRUE(all.ok()) << all.status();
  if (!all.ok()) return {all.status(), all.status()};
  return OnRanks(*all, [&](Collective& each) {
    return each.rank() == 0 ? first(each) : second(each);
  });
}

std::function<absl::Status(Collective&)> Sum(ElementType type, size_t count) {
  return [type, count](Collective& each) {
    std::vector<std::byte> bytes =
        Elements(type, count, [](size_t) { return 1; });
    return each.AllReduce(type, bytes, absl::MakeSpan(bytes));
  };
}

void ExpectNamed(const std::vector<absl::Status>& results,
                 const std::string& difference) {
  bool is_named = false;
  for (const absl::Status& each : results) {
    // The second to notice may hear of the first one's error instead.
    EXPECT_TRUE(absl::IsFailedPrecondition(each) || absl::IsAborted(each))
        << each;
    EXPECT_THAT(std::string(each.message()), HasSubstr(difference));
    is_named |= absl::IsFailedPrecondition(each);
  }
  EXPECT_TRUE(is_named);
}

TEST(TcpCollective, DifferentCallsAreNamed) {
  const auto barrier = [](Collective& each) { return each.Barrier(); };
  const auto broadcast = [](uint32_t root) {
    return [root](Collective& each) {
      std::vector<std::byte> bytes(8);
      return each.Broadcast(root, absl::MakeSpan(bytes));
    };
  };
  const auto f32 = ElementType::kFloat32;
  ExpectNamed(Disagree(barrier, Sum(f32, 4)), "is the operation");
  ExpectNamed(Disagree(Sum(f32, 4), Sum(ElementType::kUint8, 4)),
              "is the element type");
  ExpectNamed(Disagree(Sum(f32, 4), Sum(f32, 5)), "is the number of elements");
  ExpectNamed(Disagree(broadcast(0), broadcast(1)), "is the root");
}

TEST(TcpCollective, OtherSlicesAreNamed) {
  MemoryStore store;
  const absl::StatusOr<Collectives> all = MakeRanks(2, [&](uint32_t rank) {
    TcpOptions options = OptionsOf(rank, 2);
    options.slice_bytes = rank == 0 ? 64 : 128;
    return MakeTcpCollective(options, &store);
  });
  ASSERT_TRUE(all.ok()) << all.status();
  ExpectNamed(OnRanks(*all, Sum(ElementType::kFloat32, 1000)), "slice_bytes");
}

TEST(TcpCollective, SlicesDoNotChangeBits) {
  const auto result_of = [](uint64_t slice_bytes) {
    std::vector<std::byte> result;
    const absl::StatusOr<Collectives> all =
        MakeTcpRanks(3, kPatience, slice_bytes);
    EXPECT_TRUE(all.ok()) << all.status();
    if (!all.ok()) return result;
    const std::vector<absl::Status> results =
        OnRanks(*all, [&](Collective& each) {
          std::vector<std::byte> bytes =
              Elements(ElementType::kFloat32, 777, [&](size_t i) {
                return 1.0 / static_cast<double>(3 + i * (each.rank() + 1));
              });
          absl::Status status = each.AllReduce(ElementType::kFloat32, bytes,
                                               absl::MakeSpan(bytes));
          if (each.rank() == 2) result = bytes;
          return status;
        });
    for (const absl::Status& each : results) EXPECT_TRUE(each.ok()) << each;
    return result;
  };
  const std::vector<std::byte> whole = result_of(1 << 20);
  EXPECT_EQ(result_of(8), whole);
  EXPECT_EQ(result_of(104), whole);
}

TEST(TcpCollective, ARankThatEndsIsNamed) {
  absl::StatusOr<Collectives> all = MakeTcpRanks(3);
  ASSERT_TRUE(all.ok()) << all.status();
  (*all)[2].reset();
  const std::vector<absl::Status> results = OnRanks(2, [&](uint32_t rank) {
    return Sum(ElementType::kFloat32, 100'000)(*(*all)[rank]);
  });
  for (const absl::Status& each : results) {
    EXPECT_TRUE(absl::IsUnavailable(each) || absl::IsAborted(each)) << each;
    EXPECT_THAT(std::string(each.message()), HasSubstr("rank 2"));
  }
}

TEST(TcpCollective, AnAbortIsHeardByAll) {
  const absl::StatusOr<Collectives> all = MakeTcpRanks(4);
  ASSERT_TRUE(all.ok()) << all.status();
  const std::vector<absl::Status> results = OnRanks(*all, [](Collective& each) {
    if (each.rank() != 1) return each.Barrier();
    each.Abort("out of memory");
    return each.failure();
  });
  for (const absl::Status& each : results) {
    EXPECT_TRUE(absl::IsAborted(each)) << each;
    EXPECT_THAT(std::string(each.message()), HasSubstr("out of memory"));
    EXPECT_THAT(std::string(each.message()), HasSubstr("rank 1"));
  }
}

// A rank that has stopped reading: its sockets are full, and nobody waits for
// ever. The time-out of one ends all.
TEST(TcpCollective, AStalledRankEndsAll) {
  const absl::StatusOr<Collectives> all =
      MakeTcpRanks(3, absl::Milliseconds(300));
  ASSERT_TRUE(all.ok()) << all.status();
  const std::vector<absl::Status> results = OnRanks(2, [&](uint32_t rank) {
    return Sum(ElementType::kFloat32, 4 << 20)(*(*all)[rank]);
  });
  for (const absl::Status& each : results) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(each) || absl::IsAborted(each) ||
                absl::IsUnavailable(each))
        << each;
  }
}

TEST(TcpCollective, ConnectsOverIPv6) {
  const UniqueFd probe(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 loopback = {};
  loopback.sin6_family = AF_INET6;
  loopback.sin6_addr = in6addr_loopback;
  if (!probe.ok() || bind(probe.get(), reinterpret_cast<sockaddr*>(&loopback),
                          sizeof(loopback)) != 0) {
    GTEST_SKIP() << "this machine has no IPv6 loopback";
  }
  MemoryStore store;
  const absl::StatusOr<Collectives> all = MakeRanks(3, [&](uint32_t rank) {
    TcpOptions options = OptionsOf(rank, 3);
    options.host = "::1";
    options.bind_host = "::";
    return MakeTcpCollective(options, &store);
  });
  ASSERT_TRUE(all.ok()) << all.status();
  for (const absl::Status& each : OnRanks(
           *all, [](Collective& collective) { return collective.Barrier(); })) {
    EXPECT_TRUE(each.ok()) << each;
  }
}

TEST(TcpCollective, OtherWorldSizesAreRefused) {
  MemoryStore store;
  std::vector<absl::Status> results = OnRanks(2, [&](uint32_t rank) {
    TcpOptions options = OptionsOf(rank, rank == 0 ? 2 : 3);
    // Rank 0 may hear of it by nobody: rank 1 gives up before it dials.
    options.connect_timeout = absl::Seconds(1);
    return MakeTcpCollective(options, &store).status();
  });
  EXPECT_FALSE(results[0].ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(results[1])) << results[1];
  EXPECT_THAT(std::string(results[1].message()), HasSubstr("world_size"));
}

TEST(TcpCollective, AMissingRankIsNamed) {
  MemoryStore store;
  const std::vector<absl::Status> results = OnRanks(2, [&](uint32_t rank) {
    TcpOptions options = OptionsOf(rank, 3);
    options.connect_timeout = absl::Milliseconds(500);
    return MakeTcpCollective(options, &store).status();
  });
  EXPECT_TRUE(absl::IsDeadlineExceeded(results[0])) << results[0];
  EXPECT_THAT(std::string(results[0].message()), HasSubstr("2"));
}

TEST(TcpCollective, ANameIsUsedOnce) {
  MemoryStore store;
  ASSERT_TRUE(store.Set("optstate-rank-0", "of another run").ok());
  const absl::Status again =
      MakeTcpCollective(OptionsOf(0, 2), &store).status();
  EXPECT_TRUE(absl::IsAlreadyExists(again)) << again;
  TcpOptions second = OptionsOf(1, 2);
  const absl::Status read = MakeTcpCollective(second, &store).status();
  EXPECT_TRUE(absl::IsDataLoss(read)) << read;
  EXPECT_THAT(std::string(read.message()), HasSubstr("rank 0"));
}

TEST(TcpCollective, BadOptionsAreRefused) {
  MemoryStore store;
  std::vector<TcpOptions> bad(6, OptionsOf(0, 1));
  bad[0].rank = 1;
  bad[1].world_size = 0;
  bad[2].slice_bytes = 12;
  bad[3].slice_bytes = 0;
  bad[4].name = std::string(61, 'n');
  bad[5].host = "two words";
  for (size_t i = 0; i < bad.size(); ++i) {
    const absl::Status status = MakeTcpCollective(bad[i], &store).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << i << ": " << status;
  }
  TcpOptions nowhere = OptionsOf(0, 2);
  nowhere.host = "198.51.100.1";  // of no machine; RFC 5737
  EXPECT_FALSE(MakeTcpCollective(nowhere, &store).ok());
}

// Dials the port that a rank has written into the store.
UniqueFd DialAsStranger(MemoryStore* store, const std::string& key) {
  const absl::StatusOr<std::string> text =
      store->Get(key, absl::Now() + kPatience);
  EXPECT_TRUE(text.ok());
  const absl::StatusOr<AddressRecord> record =
      ParseAddressRecord(text.value_or(""));
  EXPECT_TRUE(record.ok());
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!record.ok()) return fd;
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(record->port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                    sizeof(address)),
            0);
  return fd;
}

// More ranks connect at once than strangers are borne with, and are slow to say
// who they are: none of them is taken for a stranger and hung up on.
TEST(TcpCollective, ManyRanksMayConnectBeforeTheFirstIsHeard) {
  constexpr uint32_t kRanks = 100;
  MemoryStore store;
  const auto be_all_others = [&]() -> absl::Status {
    OPTSTATE_ASSIGN_OR_RETURN(
        const std::string text,
        store.Get("optstate-rank-0", absl::Now() + kPatience));
    OPTSTATE_ASSIGN_OR_RETURN(const AddressRecord record,
                              ParseAddressRecord(text));
    std::vector<UniqueFd> ranks(kRanks);
    for (uint32_t rank = 1; rank < kRanks; ++rank) {
      ranks[rank] = DialAsStranger(&store, "optstate-rank-0");
    }
    // The last one is answered when all others have been accepted.
    for (uint32_t rank = kRanks - 1; rank > 0; --rank) {
      const Greeting::Bytes knock = Encode(
          Greeting{.secret = record.knock, .rank = rank, .world_size = kRanks});
      Greeting::Bytes answer = {};
      const int fd = ranks[rank].get();
      if (send(fd, knock.data(), knock.size(), MSG_NOSIGNAL) !=
              static_cast<ssize_t>(knock.size()) ||
          recv(fd, answer.data(), answer.size(), MSG_WAITALL) !=
              static_cast<ssize_t>(answer.size())) {
        return absl::UnavailableError(
            absl::StrCat("rank ", rank, " was hung up on"));
      }
    }
    return absl::OkStatus();
  };
  const std::vector<absl::Status> results = OnRanks(2, [&](uint32_t which) {
    return which == 1
               ? be_all_others()
               : MakeTcpCollective(OptionsOf(0, kRanks), &store).status();
  });
  for (const absl::Status& each : results) EXPECT_TRUE(each.ok()) << each;
}

// Others who find the port say nothing, or anything; the ranks meet all the
// same.
TEST(TcpCollective, StrangersDoNotHoldUpTheRanks) {
  MemoryStore store;
  std::vector<UniqueFd> strangers;
  std::vector<std::unique_ptr<Collective>> made(2);
  const std::vector<absl::Status> results = OnRanks(2, [&](uint32_t rank) {
    if (rank == 1) {
      for (int i = 0; i < 70; ++i) {
        strangers.push_back(DialAsStranger(&store, "optstate-rank-0"));
        if (i % 3 == 0) continue;  // says nothing
        std::string said(i % 3 == 1 ? 5 : Greeting::kBytes, 'x');
        if (i % 3 == 2) {
          const Greeting::Bytes guess =
              Encode(Greeting{.secret = {}, .rank = 1, .world_size = 2});
          said.assign(guess.begin(), guess.end());
        }
        EXPECT_EQ(send(strangers.back().get(), said.data(), said.size(),
                       MSG_NOSIGNAL),
                  static_cast<ssize_t>(said.size()));
      }
    }
    absl::StatusOr<std::unique_ptr<Collective>> collective =
        MakeTcpCollective(OptionsOf(rank, 2), &store);
    if (!collective.ok()) return collective.status();
    made[rank] = *std::move(collective);
    return made[rank]->Barrier();
  });
  for (const absl::Status& each : results) EXPECT_TRUE(each.ok()) << each;
}

}  // namespace
}  // namespace optstate::client
