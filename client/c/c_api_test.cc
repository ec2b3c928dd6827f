#include "client/c_api.h"

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "client/c_api_access.h"
#include "client/c_api_devices.h"
#include "client/c_api_nodes.h"
#include "client/c_api_sleep.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/daemon_fixture.h"

extern "C" int optstate_test_run_in_c(const char* endpoint);

namespace optstate {
namespace {

using testing::HasSubstr;

constexpr int kInvalidArgument =
    static_cast<int>(absl::StatusCode::kInvalidArgument);

// A struct of a caller compiled later than this library: it has more fields.
struct LaterParameter {
  optstate_parameter known;
  uint64_t unknown = ~uint64_t{0};
};

class CApiTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto daemon = TestDaemon::Start();
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = daemon->release();
  }
  static void TearDownTestSuite() {
    delete daemon_;
    daemon_ = nullptr;
  }

  void SetUp() override {
    ASSERT_NE(daemon_, nullptr);
    endpoint_ = daemon_->shm_endpoint();
    parameter_ = {};
    group_ = {};
    options_ = {};
    parameter_.struct_size = sizeof(parameter_);
    parameter_.name = "w";
    parameter_.shape = &shape_;
    parameter_.ndim = 1;
    parameter_.numel = shape_;
    parameter_.dtype = OPTSTATE_FLOAT32;
    parameter_.gradient_dtype = OPTSTATE_FLOAT32;
    group_.struct_size = sizeof(group_);
    options_.struct_size = sizeof(options_);
    options_.endpoint = endpoint_.c_str();
    options_.job = "c-api";
    options_.optimizer = OPTSTATE_ADAM;
    options_.world_size = 1;
    options_.ephemeral = 1;
    options_.groups = &group_;
    options_.group_count = 1;
    options_.parameters = &parameter_;
    options_.parameter_count = 1;
  }

  void ExpectRefused(const char* text) {
    optstate_session* session = nullptr;
    EXPECT_EQ(optstate_session_open(&options_, &session), kInvalidArgument);
    EXPECT_EQ(session, nullptr);
    EXPECT_THAT(optstate_last_error(), HasSubstr(text));
  }

  static TestDaemon* daemon_;
  std::string endpoint_;
  int64_t shape_ = 10;
  optstate_parameter parameter_ = {};
  optstate_group group_ = {};
  optstate_session_options options_ = {};
};

TestDaemon* CApiTest::daemon_ = nullptr;

TEST_F(CApiTest, AccessIsReadAndChecked) {
  const char* readers[] = {"root", nullptr};
  optstate_job_access access = {};
  options_.job = "c-api-access";
  options_.access = &access;
  ExpectRefused("access.struct_size");
  access.struct_size = sizeof(access);
  access.reader_count = 1;
  ExpectRefused("access.readers is NULL");
  access.readers = readers;
  ExpectRefused("set private too");
  access.is_private = 1;
  access.reader_count = 2;
  ExpectRefused("access.readers[1] is NULL");
  access.reader_count = 1;
  access.group = "no such group";
  ExpectRefused("no such group");
  access.group = nullptr;
  optstate_session* session = nullptr;
  ASSERT_EQ(optstate_session_open(&options_, &session), 0)
      << optstate_last_error();
  const auto job = daemon_->GetJob(options_.job);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_TRUE(job->access().is_private());
  ASSERT_EQ(job->access().readers_size(), 1);
  EXPECT_EQ(job->access().readers(0), "root");
  optstate_session_close(session);
}

TEST_F(CApiTest, RunsFromC) {
  EXPECT_EQ(optstate_test_run_in_c(daemon_->shm_endpoint().c_str()), 0);
  EXPECT_EQ(optstate_test_run_in_c(daemon_->grpc_endpoint().c_str()), 0);
}

TEST_F(CApiTest, OlderCallerHasASmallerStruct) {
  // This size excludes the timeouts and the daemon's path; fields behind it are
  // not read.
  options_.struct_size = offsetof(optstate_session_options, connect_timeout_s);
  options_.connect_timeout_s = -1;
  options_.daemon_path = reinterpret_cast<const char*>(1);
  optstate_session* session = nullptr;
  ASSERT_EQ(optstate_session_open(&options_, &session), 0)
      << optstate_last_error();

  optstate_session_info info;
  std::memset(&info, 0x55, sizeof(info));
  info.struct_size = offsetof(optstate_session_info, created);
  EXPECT_EQ(optstate_session_get_info(session, &info), 0);
  EXPECT_EQ(info.committed_step, 0);
  EXPECT_EQ(info.phase, OPTSTATE_PHASE_LOADING);
  EXPECT_EQ(info.created, 0x55555555);
  optstate_session_close(session);
}

TEST_F(CApiTest, LaterCallerHasALargerElement) {
  std::vector<LaterParameter> parameters(3);
  const char* const names[] = {"a", "b", "c"};
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].known = parameter_;
    parameters[i].known.struct_size = sizeof(LaterParameter);
    parameters[i].known.name = names[i];
  }
  options_.parameters = &parameters[0].known;
  options_.parameter_count = parameters.size();
  optstate_session* session = nullptr;
  ASSERT_EQ(optstate_session_open(&options_, &session), 0)
      << optstate_last_error();
  optstate_session_info info = {};
  info.struct_size = sizeof(info);
  EXPECT_EQ(optstate_session_get_info(session, &info), 0);
  EXPECT_EQ(info.piece_count, 3);
  optstate_session_close(session);
}

TEST_F(CApiTest, TooSmallStructsAreRefused) {
  options_.struct_size = 8;
  ExpectRefused("options.struct_size is 8");
  options_.struct_size = 0;
  ExpectRefused("options.struct_size is 0");
  SetUp();
  parameter_.struct_size = offsetof(optstate_parameter, group);
  ExpectRefused("parameters.struct_size");
  SetUp();
  group_.struct_size = 0;
  ExpectRefused("groups.struct_size");
}

TEST_F(CApiTest, BadValuesAreNamed) {
  options_.optimizer = 77;
  ExpectRefused("optimizer 77");
  SetUp();
  options_.partition = -1;
  ExpectRefused("partition -1");
  SetUp();
  parameter_.dtype = 9;
  ExpectRefused("dtype 9");
  SetUp();
  parameter_.numel = 11;
  ExpectRefused("\"w\"");
  SetUp();
  parameter_.name = nullptr;
  ExpectRefused("parameter 0: name is NULL");
  SetUp();
  options_.parameters = nullptr;
  ExpectRefused("parameters is NULL");
  SetUp();
  options_.job = nullptr;
  ExpectRefused("job");
  SetUp();
  options_.endpoint = "carrier-pigeon";
  ExpectRefused("carrier-pigeon");
  SetUp();
  options_.step_timeout_s = -3;
  ExpectRefused("step_timeout_s");
  EXPECT_EQ(optstate_session_open(nullptr, nullptr), kInvalidArgument);
}

TEST_F(CApiTest, NullsAndRangesAreRefused) {
  EXPECT_EQ(optstate_flush(nullptr), kInvalidArgument);
  optstate_session_close(nullptr);
  optstate_session* session = nullptr;
  ASSERT_EQ(optstate_session_open(&options_, &session), 0)
      << optstate_last_error();
  const void* data = nullptr;
  size_t bytes = 0;
  EXPECT_EQ(optstate_session_parameter(session, 1, &data, &bytes),
            kInvalidArgument);
  EXPECT_EQ(optstate_session_parameter(session, 0, nullptr, &bytes),
            kInvalidArgument);
  EXPECT_EQ(optstate_push_gradients(session, 1, 0, nullptr, nullptr, 1),
            kInvalidArgument);
  EXPECT_EQ(optstate_load(session, 99, 0, OPTSTATE_FLOAT32, &bytes),
            kInvalidArgument);
  EXPECT_EQ(
      optstate_load(session, OPTSTATE_MASTER, 5, OPTSTATE_FLOAT32, &bytes),
      kInvalidArgument);
  EXPECT_EQ(optstate_fetch(session, OPTSTATE_MASTER, 0, &bytes, 8, nullptr),
            kInvalidArgument);
  EXPECT_EQ(optstate_commit(session, nullptr, nullptr), kInvalidArgument);
  EXPECT_EQ(optstate_session_get_info(session, nullptr), kInvalidArgument);
  optstate_session_close(session);
}

TEST_F(CApiTest, AJobBeginsAtTheStepOfAnother) {
  options_.job = "c-api-begin-at";
  optstate_session* session = nullptr;
  ASSERT_EQ(optstate_session_open(&options_, &session), 0)
      << optstate_last_error();
  const std::vector<float> zeros(shape_, 0.0f);
  ASSERT_EQ(optstate_begin_load(session), 0);
  ASSERT_EQ(optstate_load(session, OPTSTATE_MASTER, 0, OPTSTATE_FLOAT32,
                          zeros.data()),
            0);
  EXPECT_EQ(optstate_finish_load_at(session, 7, 0), kInvalidArgument);
  EXPECT_EQ(optstate_finish_load_at(session, 0, 0), kInvalidArgument);
  EXPECT_EQ(optstate_finish_load_at(session, uint64_t{1} << 63, 1),
            kInvalidArgument);
  ASSERT_EQ(optstate_finish_load_at(session, 7, 3), 0) << optstate_last_error();
  optstate_session_info info = {};
  info.struct_size = sizeof(info);
  ASSERT_EQ(optstate_session_get_info(session, &info), 0);
  EXPECT_EQ(info.committed_step, 7u);
  EXPECT_EQ(info.phase, OPTSTATE_PHASE_READY);
  optstate_session_close(session);
}

// Takes steps of SGD, of rate 1, with a gradient made in place.
TEST_F(CApiTest, GradientsMadeInTheViewsNeedNoCopy) {
  options_.optimizer = OPTSTATE_SGD;
  options_.job = "c-api-gradient-views";
  optstate_session* session = nullptr;
  ASSERT_EQ(optstate_session_open(&options_, &session), 0)
      << optstate_last_error();
  const std::vector<float> zeros(shape_, 0.0f);
  ASSERT_EQ(optstate_begin_load(session), 0);
  ASSERT_EQ(optstate_load(session, OPTSTATE_MASTER, 0, OPTSTATE_FLOAT32,
                          zeros.data()),
            0);
  ASSERT_EQ(optstate_finish_load(session), 0);
  optstate_piece piece = {};
  piece.struct_size = sizeof(piece);
  ASSERT_EQ(optstate_session_pieces(session, &piece, 1), 0);
  optstate_gradient_views* views = nullptr;
  int64_t distance = 0;
  EXPECT_EQ(optstate_gradient_views_map(session, nullptr, &distance),
            kInvalidArgument);
  ASSERT_EQ(optstate_gradient_views_map(session, &views, &distance), 0)
      << optstate_last_error();
  auto* const view = reinterpret_cast<float*>(
      reinterpret_cast<intptr_t>(piece.gradient) + distance);
  optstate_hyperparams group = {};
  group.struct_size = sizeof(group);
  group.value[0] = 1;  // the learning rate
  const uint32_t index = 0;
  const auto step = [&](uint64_t number) {
    const void* const in_place = piece.gradient;
    EXPECT_EQ(optstate_push_gradients(session, number, 0, &index, &in_place, 1),
              0);
    optstate_commit_options commit = {};
    commit.struct_size = sizeof(commit);
    commit.step = number;
    commit.groups = &group;
    commit.group_count = 1;
    EXPECT_EQ(optstate_commit(session, &commit, nullptr), 0)
        << optstate_last_error();
    const void* data = nullptr;
    size_t bytes = 0;
    EXPECT_EQ(optstate_session_parameter(session, 0, &data, &bytes), 0);
    return *static_cast<const float*>(data);
  };
  const std::vector<float> gradient(shape_, 3.0f);
  EXPECT_EQ(optstate_gradient_views_put(views, view, gradient.data(),
                                        shape_ * sizeof(float)),
            0);
  EXPECT_EQ(step(1), -3);
  // Private memory is not the area, and outlives the session.
  const void* const kept = view;
  const size_t bytes = shape_ * sizeof(float);
  EXPECT_EQ(optstate_gradient_views_keep(views, nullptr, nullptr, 1),
            kInvalidArgument);
  EXPECT_EQ(optstate_gradient_views_keep(views, &kept, &bytes, 1), 0);
  for (int64_t i = 0; i < shape_; ++i) view[i] *= 2;
  EXPECT_EQ(step(2), -6);
  optstate_session_close(session);
  EXPECT_EQ(view[shape_ - 1], 6);
  optstate_gradient_views_free(views);
}

TEST_F(CApiTest, GradientViewsNeedSharedMemory) {
  const std::string endpoint = daemon_->grpc_endpoint();
  options_.endpoint = endpoint.c_str();
  optstate_session* session = nullptr;
  ASSERT_EQ(optstate_session_open(&options_, &session), 0)
      << optstate_last_error();
  optstate_gradient_views* views = nullptr;
  int64_t distance = 0;
  EXPECT_EQ(optstate_gradient_views_map(session, &views, &distance),
            static_cast<int>(absl::StatusCode::kUnimplemented));
  EXPECT_THAT(optstate_last_error(), HasSubstr("gradients are copied"));
  optstate_session_close(session);
}

TEST_F(CApiTest, ErrorTextBelongsToTheThread) {
  options_.optimizer = 77;
  ExpectRefused("optimizer 77");
  std::thread other([] {
    EXPECT_STREQ(optstate_last_error(), "");
    EXPECT_EQ(optstate_flush(nullptr), kInvalidArgument);
    EXPECT_THAT(optstate_last_error(), HasSubstr("session is NULL"));
  });
  other.join();
  EXPECT_THAT(optstate_last_error(), HasSubstr("optimizer 77"));
}

TEST_F(CApiTest, OptimizersHaveNoNullStrings) {
  optstate_optimizer_info info = {};
  info.struct_size = sizeof(info);
  uint32_t count = 0;
  for (; optstate_optimizer(count, &info) == 0; ++count) {
    ASSERT_NE(info.name, nullptr);
    ASSERT_NE(info.scalar, nullptr) << info.name;
    EXPECT_EQ(std::strcmp(info.scalar, "") != 0,
              std::strcmp(info.name, "nadam") == 0);
    for (size_t k = 0; k < info.option_count; ++k) {
      EXPECT_NE(info.options[k], nullptr) << info.name;
    }
  }
  EXPECT_GT(count, 10u);
}

TEST_F(CApiTest, HasAVersion) { EXPECT_STRNE(optstate_version(), ""); }

TEST_F(CApiTest, SleepAndWakeCheckTheirStructs) {
  optstate_job_address address = {};
  address.struct_size = sizeof(address);
  address.endpoint = endpoint_.c_str();
  address.job = "absent";
  optstate_sleep_options options = {};
  options.struct_size = sizeof(options);
  optstate_sleep_result result = {};
  result.struct_size = sizeof(result);
  constexpr int kNotFound = static_cast<int>(absl::StatusCode::kNotFound);
  EXPECT_EQ(optstate_sleep_job(&address, &options, &result), kNotFound);
  EXPECT_EQ(optstate_wake_job(&address, nullptr, &result), kNotFound);
  EXPECT_THAT(optstate_last_error(), HasSubstr("absent"));
  EXPECT_EQ(optstate_sleep_job(&address, &options, nullptr), kInvalidArgument);
  EXPECT_THAT(optstate_last_error(), HasSubstr("result is NULL"));
  options.whole_timeout_s = -1;
  EXPECT_EQ(optstate_sleep_job(&address, &options, &result), kInvalidArgument);
  EXPECT_THAT(optstate_last_error(), HasSubstr("options.whole_timeout_s"));
  options.struct_size = 1;
  EXPECT_EQ(optstate_wake_job(&address, &options, &result), kInvalidArgument);
  EXPECT_THAT(optstate_last_error(), HasSubstr("options.struct_size"));
  address.job = nullptr;
  EXPECT_EQ(optstate_wake_job(&address, nullptr, &result), kInvalidArgument);
  EXPECT_THAT(optstate_last_error(), HasSubstr("address.job is NULL"));
}

TEST_F(CApiTest, ParametersOfADeviceAreRefusedWithAReason) {
  options_.job = "c-api-devices";
  optstate_session* session = nullptr;
  ASSERT_EQ(optstate_session_open(&options_, &session), 0)
      << optstate_last_error();
  optstate_device_parameters* parameters = nullptr;
  EXPECT_EQ(optstate_device_parameters_map(session, nullptr, &parameters),
            kInvalidArgument);
  EXPECT_EQ(optstate_device_parameters_map(session, "emulated-0", nullptr),
            kInvalidArgument);
  // The job has no device_budget.
  EXPECT_EQ(optstate_device_parameters_map(session, "emulated-0", &parameters),
            static_cast<int>(absl::StatusCode::kNotFound));
  EXPECT_EQ(parameters, nullptr);
  EXPECT_THAT(optstate_last_error(), HasSubstr("device_budget"));
  // Nor is there anything to ask of what there is not.
  int file = -1;
  uint64_t bytes = 0;
  EXPECT_EQ(optstate_device_parameters_memory(nullptr, &file, &bytes),
            kInvalidArgument);
  int32_t is_over = 0;
  EXPECT_EQ(optstate_device_parameters_is_over(nullptr, &is_over),
            kInvalidArgument);
  size_t count = 0;
  EXPECT_EQ(
      optstate_device_parameters_find(session, nullptr, 0, nullptr, 0, &count),
      kInvalidArgument);
  const uint32_t wanted = 0;
  uint64_t offset = 0;
  EXPECT_EQ(optstate_device_parameters_find_whole(session, nullptr, &wanted, 1,
                                                  &offset),
            kInvalidArgument);
  optstate_device_parameters_free(nullptr);
  optstate_session_close(session);
}

TEST_F(CApiTest, GradientsOnADeviceAreRefusedWithAReason) {
  options_.job = "c-api-device-gradients";
  optstate_session* session = nullptr;
  ASSERT_EQ(optstate_session_open(&options_, &session), 0)
      << optstate_last_error();
  optstate_device_gradients* gradients = nullptr;
  constexpr int kFile = 1;  // any
  EXPECT_EQ(optstate_device_gradients_share(session, nullptr, kFile, 4096,
                                            &gradients),
            kInvalidArgument);
  EXPECT_EQ(optstate_device_gradients_share(session, "emulated-0", kFile, 0,
                                            &gradients),
            kInvalidArgument);
  EXPECT_THAT(optstate_last_error(), HasSubstr("no bytes"));
  // The job has no device_budget.
  EXPECT_EQ(optstate_device_gradients_share(session, "emulated-0", kFile, 4096,
                                            &gradients),
            static_cast<int>(absl::StatusCode::kNotFound));
  EXPECT_EQ(gradients, nullptr);
  EXPECT_THAT(optstate_last_error(), HasSubstr("device_budget"));
  const uint32_t parameter = 0;
  const uint64_t offset = 0;
  EXPECT_EQ(optstate_device_gradients_mark(nullptr, 1, &parameter, &offset, 1),
            kInvalidArgument);
  EXPECT_EQ(optstate_device_gradients_clear(nullptr, &parameter, 1),
            kInvalidArgument);
  EXPECT_EQ(optstate_device_gradients_give_up(session), 0)
      << optstate_last_error();
  optstate_device_gradients_free(nullptr);
  optstate_session_close(session);
}

}  // namespace
}  // namespace optstate
