#include "tests/load/admin_load.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "tests/load/quantiles.h"

namespace optstate::load {
namespace {

// A call that nobody answers for so long fails the run.
constexpr absl::Duration kPatience = absl::Seconds(60);

// Keeps the first text.
void NoteWrong(std::string text, AdminTally* tally) {
  if (tally->wrong.empty()) tally->wrong = std::move(text);
}

std::string CheckJobCount(const char* method, size_t found, size_t expected) {
  if (found == expected) return "";
  return absl::StrCat(method, " has ", found, " jobs of ", expected);
}

// Makes one call, which takes answers of engines of such an age; `call` returns
// what is wrong with an answer, "" if nothing.
template <typename Function>
void Time(const char* method, uint32_t age_max_ms, AdminTally* tally,
          const Function& call) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  if (age_max_ms != 0) {
    context.AddMetadata("optstate-max-age-ms", absl::StrCat(age_max_ms));
  }
  std::string wrong;
  const absl::Time begin = absl::Now();
  const grpc::Status status = call(&context, &wrong);
  const absl::Duration took = absl::Now() - begin;
  ++tally->made;
  if (status.ok()) {
    tally->answered_ms[method].push_back(absl::ToDoubleMilliseconds(took));
    if (!wrong.empty()) NoteWrong(std::move(wrong), tally);
    return;
  }
  ++tally->refused[static_cast<absl::StatusCode>(status.error_code())];
  if (status.error_message().empty()) {
    NoteWrong(absl::StrCat(method, " was refused without a text"), tally);
  }
}

// The protos of this service are not installed with gRPC.
grpc::Status CheckHealth(grpc::GenericStub* stub,
                         grpc::ClientContext* context) {
  grpc::CompletionQueue queue;
  const grpc::ByteBuffer of_the_server(nullptr, 0);
  const auto call = stub->PrepareUnaryCall(
      context, "/grpc.health.v1.Health/Check", of_the_server, &queue);
  call->StartCall();
  grpc::ByteBuffer reply;
  grpc::Status status;
  call->Finish(&reply, &status, /*tag=*/nullptr);
  void* tag = nullptr;
  bool is_ok = false;
  queue.Next(&tag, &is_ok);
  return status;
}

}  // namespace

std::shared_ptr<grpc::Channel> Connect(const std::string& socket) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // A list of 256 jobs with their ranks may be larger than gRPC's 4 MiB.
  arguments.SetMaxReceiveMessageSize(-1);
  return grpc::CreateCustomChannel(absl::StrCat("unix:", socket),
                                   grpc::InsecureChannelCredentials(),
                                   arguments);
}

std::unique_ptr<v1::Admin::Stub> ConnectAdmin(const std::string& socket) {
  return v1::Admin::NewStub(Connect(socket));
}

uint64_t AdminTally::answered() const { return all_ms().size(); }

std::vector<double> AdminTally::all_ms() const {
  std::vector<double> all;
  for (const auto& [method, times] : answered_ms) {
    all.insert(all.end(), times.begin(), times.end());
  }
  return all;
}

void AdminTally::Add(const AdminTally& other) {
  for (const auto& [method, times] : other.answered_ms) {
    std::vector<double>& mine = answered_ms[method];
    mine.insert(mine.end(), times.begin(), times.end());
  }
  for (const auto& [code, count] : other.refused) refused[code] += count;
  unanswered_jobs += other.unanswered_jobs;
  if (wrong.empty()) wrong = other.wrong;
  made += other.made;
  seconds += other.seconds;
}

std::string AdminTally::ToString() const {
  std::string text = absl::StrFormat(
      "%d calls made, %d answered, %.0f made a second", made, answered(),
      seconds > 0 ? static_cast<double>(made) / seconds : 0);
  for (const auto& [code, count] : refused) {
    absl::StrAppend(&text, ", ", count, " ", absl::StatusCodeToString(code));
  }
  absl::StrAppend(&text, ", ", unanswered_jobs, " jobs of lists unanswered");
  for (const auto& [method, times] : answered_ms) {
    const auto count = static_cast<double>(times.size());
    absl::StrAppendFormat(&text, "\n    %s: %.0f answered a second, %s", method,
                          seconds > 0 ? count / seconds : 0,
                          QuantilesOf(times).ToString());
  }
  if (!wrong.empty()) absl::StrAppend(&text, "\n    WRONG: ", wrong);
  return text;
}

AdminLoad::AdminLoad(Options options) : options_(std::move(options)) {
  for (size_t i = 0; i < std::max<size_t>(options_.channels, 1); ++i) {
    const std::shared_ptr<grpc::Channel> channel = Connect(options_.socket);
    connections_.push_back(
        {.admin = v1::Admin::NewStub(channel),
         .bare = std::make_unique<grpc::GenericStub>(channel)});
  }
}

AdminTally AdminLoad::Run(const Stretch& stretch) {
  return RunThreads(stretch, [this](uint64_t number, const Connection& to,
                                    AdminTally* tally) {
    CallAdmin(number, to.admin.get(), tally);
  });
}

AdminTally AdminLoad::RunBare(const Stretch& stretch) {
  return RunThreads(stretch, [](uint64_t /*number*/, const Connection& to,
                                AdminTally* tally) {
    Time("Health/Check", 0, tally,
         [&](grpc::ClientContext* context, std::string* /*wrong*/) {
           return CheckHealth(to.bare.get(), context);
         });
  });
}

AdminTally AdminLoad::RunThreads(const Stretch& stretch, Call call) {
  next_.store(0);
  const absl::Time begin = absl::Now();
  std::vector<AdminTally> tallies(std::max<size_t>(options_.threads, 1));
  std::vector<std::thread> threads;
  threads.reserve(tallies.size());
  for (size_t i = 0; i < tallies.size(); ++i) {
    threads.emplace_back([this, i, &stretch, begin, call, &tallies] {
      RunThread(i, stretch, begin, call, &tallies[i]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  AdminTally all;
  for (const AdminTally& tally : tallies) all.Add(tally);
  all.seconds = absl::ToDoubleSeconds(absl::Now() - begin);
  return all;
}

void AdminLoad::RunThread(size_t thread, const Stretch& stretch,
                          absl::Time begin, Call call, AdminTally* tally) {
  const Connection& connection = connections_[thread % connections_.size()];
  const absl::Time end = begin + stretch.time;
  while (true) {
    const uint64_t number = next_.fetch_add(1);
    if (number >= stretch.count) return;
    if (options_.calls_per_second > 0) {
      const absl::Time due = begin + absl::Seconds(static_cast<double>(number) /
                                                   options_.calls_per_second);
      if (due >= end) return;
      if (due > absl::Now()) absl::SleepFor(due - absl::Now());
    }
    if (absl::Now() >= end) return;
    call(number, connection, tally);
  }
}

void AdminLoad::CallAdmin(uint64_t number, v1::Admin::Stub* stub,
                          AdminTally* tally) const {
  const size_t jobs = options_.jobs.size();
  const uint64_t every = std::max<uint64_t>(options_.lists_every, 1);
  if (jobs != 0 && number % every != 0) {
    // The calls before this one, without lists.
    const uint64_t before = number - number / every - 1;
    const std::string& name = options_.jobs[before % jobs];
    return Time("GetJob", options_.age_max_ms, tally,
                [&](grpc::ClientContext* context, std::string* wrong) {
                  v1::GetJobRequest request;
                  request.set_name(name);
                  v1::Job reply;
                  grpc::Status status = stub->GetJob(context, request, &reply);
                  if (reply.name() != name) {
                    *wrong = absl::StrCat("GetJob of ", name, " is of \"",
                                          reply.name(), "\"");
                  }
                  return status;
                });
  }
  if (number / every % 2 == 0) {
    return Time("GetStatus", options_.age_max_ms, tally,
                [&](grpc::ClientContext* context, std::string* wrong) {
                  v1::ServerStatus reply;
                  grpc::Status status = stub->GetStatus(context, {}, &reply);
                  *wrong = CheckJobCount("GetStatus", reply.job_count(), jobs);
                  tally->unanswered_jobs +=
                      static_cast<uint64_t>(reply.unanswered_size());
                  return status;
                });
  }
  Time("ListJobs", options_.age_max_ms, tally,
       [&](grpc::ClientContext* context, std::string* wrong) {
         v1::ListJobsReply reply;
         grpc::Status status = stub->ListJobs(context, {}, &reply);
         *wrong = CheckJobCount("ListJobs",
                                static_cast<size_t>(reply.jobs_size()), jobs);
         tally->unanswered_jobs +=
             static_cast<uint64_t>(reply.unanswered_size());
         return status;
       });
}

}  // namespace optstate::load
