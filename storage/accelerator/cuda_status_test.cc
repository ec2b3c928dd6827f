// Tests the text of each error of CUDA without a GPU, in builds with and
// without CUDA.

#include "storage/accelerator/cuda_status.h"

#ifdef OPTSTATE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#include <cstdlib>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::accelerator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Code = absl::StatusCode;

constexpr char kCall[] = "cudaSomething of 7 bytes";

std::string TextOf(int error, const CudaSurroundings& surroundings = {},
                   absl::string_view call = kCall) {
  return std::string(CudaStatus(error, call, surroundings, "").message());
}

TEST(CudaStatusTest, EachErrorSaysWhatWasWrongWhereAndWhatToDo) {
  for (const CudaError& each : CudaErrors()) {
    SCOPED_TRACE(each.name);
    const absl::Status status = CudaStatus(each.error, kCall, {}, "");
    EXPECT_EQ(status.code(), each.code);
    EXPECT_THAT(status.message(),
                AllOf(HasSubstr(absl::StrCat(kCall, ": ", each.name, ", ")),
                      Not(HasSubstr("this process has"))));
    EXPECT_STRNE(each.what, "");
    // The others are mistakes of the caller.
    if (each.code != Code::kInvalidArgument &&
        each.code != Code::kUnimplemented) {
      EXPECT_STRNE(each.advice, "");
      EXPECT_THAT(status.message(), HasSubstr("; "));
    }
  }
}

TEST(CudaStatusTest, ErrorsAreListedByNumberAndOnce) {
  int former = 0;
  for (const CudaError& each : CudaErrors()) {
    EXPECT_LT(former, each.error) << each.name;
    former = each.error;
  }
}

// The executor gives a device up by this code, and by no other.
TEST(CudaStatusTest, ALostDeviceIsInternalAndSaysSo) {
  int lost = 0;
  for (const CudaError& each : CudaErrors()) {
    const bool says = TextOf(each.error).find("is lost for this process") !=
                      std::string::npos;
    EXPECT_EQ(says, each.code == Code::kInternal) << each.name;
    lost += says ? 1 : 0;
  }
  EXPECT_GT(lost, 10);
}

TEST(CudaStatusTest, NamesAreThoseOfTheToolkit) {
#ifdef OPTSTATE_HAS_CUDA
  for (const CudaError& each : CudaErrors()) {
    const std::string name =
        cudaGetErrorName(static_cast<cudaError_t>(each.error));
    if (name == "unrecognized error code") continue;  // an older toolkit
    EXPECT_EQ(name, each.name);
  }
#else
  GTEST_SKIP() << "this build has no CUDA";
#endif
}

TEST(CudaStatusTest, SuccessIsNoError) {
  EXPECT_EQ(CudaStatus(0, kCall, {}, ""), absl::OkStatus());
}

TEST(CudaStatusTest, AnErrorWithoutATextHasItsNumberAndCudasWords) {
  EXPECT_EQ(
      CudaStatus(4711, kCall, {}, ""),
      absl::UnavailableError(absl::StrCat(kCall, ": error 4711 of CUDA")));
  EXPECT_EQ(CudaStatus(4711, kCall, {}, "cudaErrorNew, all is new"),
            absl::UnavailableError(absl::StrCat(
                kCall, ": error 4711 of CUDA, cudaErrorNew, all is new")));
}

// One fault of a node, as CUDA reports it.
struct Fault {
  std::string name;
  int error = 0;
  Code code = Code::kOk;
  std::vector<std::string> texts;
};
void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.name; }

class NodeFaultTest : public testing::TestWithParam<Fault> {};

TEST_P(NodeFaultTest, HasACodeAndSaysWhatToDo) {
  const Fault& fault = GetParam();
  const absl::Status status = CudaStatus(fault.error, kCall, {}, "");
  EXPECT_EQ(status.code(), fault.code) << status;
  for (const std::string& text : fault.texts) {
    EXPECT_THAT(status.message(), HasSubstr(text));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Faults, NodeFaultTest,
    testing::Values(
        Fault{"NoDriver",
              35,
              Code::kFailedPrecondition,
              {"no driver", "libcuda.so.1", "--gpus all"}},
        Fault{"StubOfTheToolkit",
              34,
              Code::kFailedPrecondition,
              {"stub", "LD_LIBRARY_PATH"}},
        Fault{"DriverUpdatedWithoutAReboot",
              803,
              Code::kFailedPrecondition,
              {"different versions", "reboot"}},
        Fault{"NoFabricManager",
              802,
              Code::kFailedPrecondition,
              {"nvidia-fabricmanager"}},
        Fault{"NoGpu",
              100,
              Code::kFailedPrecondition,
              {"nvidia-smi -L", "DeviceAllow=char-nvidia*", "nvidia-smi mig"}},
        Fault{"GpuThatMayNotBeOpened",
              304,
              Code::kFailedPrecondition,
              {"/dev/nvidia*", "DeviceAllow=char-nvidia*"}},
        Fault{"ExclusiveComputeMode",
              46,
              Code::kFailedPrecondition,
              {"busy", "exclusive", "nvidia-smi -c DEFAULT", "MPS"}},
        Fault{"NoMpsDaemon",
              805,
              Code::kFailedPrecondition,
              {"MPS daemon does not answer", "nvidia-cuda-mps-control",
               "CUDA_MPS_PIPE_DIRECTORY"}},
        Fault{"MpsConnectionBroken", 806, Code::kInternal, {"MPS server"}},
        Fault{"MpsServerStarts", 807, Code::kUnavailable, {"at the moment"}},
        Fault{"TooManyMpsClients",
              808,
              Code::kFailedPrecondition,
              {"as many clients", "optctl describe device"}},
        Fault{"TooManyMpsConnections",
              809,
              Code::kFailedPrecondition,
              {"as many connections", "optctl describe device"}},
        Fault{
            "EndedByTheMpsServer", 810, Code::kInternal, {"ended this client"}},
        Fault{"NoKernelForTheArchitecture",
              209,
              Code::kFailedPrecondition,
              {"architecture", "CUDA_VISIBLE_DEVICES", "ARCHITECTURES"}},
        Fault{"PtxThatIsTooNew",
              222,
              Code::kFailedPrecondition,
              {"too old", "newer driver"}},
        Fault{"DeviceMemoryFull",
              2,
              Code::kResourceExhausted,
              {"memory is used up", "device_budget"}},
        Fault{"OffTheBusAtTheStart",
              3,
              Code::kFailedPrecondition,
              {"off the bus", "dmesg", "--gpu-reset"}},
        Fault{"OffTheBusLater",
              999,
              Code::kInternal,
              {"off the bus", "dmesg", "optctl upgrade"}},
        Fault{"NoLongerListed", 101, Code::kNotFound, {"nvidia-smi"}},
        Fault{"DamagedMemory",
              214,
              Code::kInternal,
              {"cannot be corrected", "--gpu-reset"}}),
    [](const auto& tested) { return tested.param.name; });

TEST(CudaStatusTest, ADriverThatIsTooOldIsNotOneThatIsMissing) {
  CudaSurroundings surroundings;
  surroundings.driver_version = 11040;
  surroundings.runtime_version = 13010;
  EXPECT_THAT(TextOf(35, surroundings),
              AllOf(HasSubstr("the driver is for CUDA 11.4 at most"),
                    HasSubstr("built with CUDA 13.1"),
                    HasSubstr("newer driver"), Not(HasSubstr("no driver"))));
  // It says so by itself, whatever its number.
  surroundings.driver_version = surroundings.runtime_version;
  EXPECT_THAT(TextOf(35, surroundings), HasSubstr("the driver is too old"));
}

TEST(CudaStatusTest, PinnedMemoryIsNotTheDevices) {
  EXPECT_THAT(TextOf(2, {}, "cudaHostRegister of 4096 bytes"),
              AllOf(HasSubstr("can be pinned"), HasSubstr("host memory"),
                    Not(HasSubstr("the device's memory"))));
}

TEST(CudaStatusTest, HiddenDevicesAreNamed) {
  CudaSurroundings surroundings;
  surroundings.visible_devices = " ";
  EXPECT_THAT(TextOf(100, surroundings),
              HasSubstr("CUDA_VISIBLE_DEVICES is empty"));
  surroundings.visible_devices = "9";
  EXPECT_THAT(
      TextOf(100, surroundings),
      AllOf(HasSubstr("CUDA_VISIBLE_DEVICES is \"9\", which names no"),
            HasSubstr("MIG mode needs an instance"), HasSubstr("under MPS")));
  surroundings.visible_devices = "MIG-c6d4f1ef";
  EXPECT_THAT(
      TextOf(100, surroundings),
      AllOf(HasSubstr("CUDA_VISIBLE_DEVICES is \"MIG-c6d4f1ef\", and there is "
                      "no such MIG instance"),
            HasSubstr("nvidia-smi mig -cgi PROFILE -C")));
}

TEST(CudaStatusTest, LimitsOfMpsAreNamedWhereTheyMayBeTheCause) {
  CudaSurroundings surroundings;
  surroundings.mps_memory_limit = "0=1G,1=512M";
  surroundings.mps_thread_percentage = "12.5";
  surroundings.mps_pipe_directory = "/run/mps";
  for (const CudaError& each : CudaErrors()) {
    const std::string text = TextOf(each.error, surroundings);
    const std::string limits =
        "; this process has CUDA_MPS_PIPE_DIRECTORY=/run/mps, "
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=12.5, "
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1G,1=512M from the environment";
    EXPECT_EQ(text.find(limits) != std::string::npos, each.may_be_mps) << text;
  }
}

TEST(CudaStatusTest, LimitsOfMpsThatAreNoneAreNamed) {
  for (const char* percentage : {"0", "-1", "101", "half", "", "nan"}) {
    CudaSurroundings surroundings;
    surroundings.mps_thread_percentage = percentage;
    EXPECT_THAT(TextOf(46, surroundings),
                HasSubstr(absl::StrCat("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=",
                                       percentage, " (which is no number")));
  }
  for (const char* limit : {"8G", "0=", "=8G", "", "0=8G,", "0=all", "0=1=2"}) {
    CudaSurroundings surroundings;
    surroundings.mps_memory_limit = limit;
    EXPECT_THAT(TextOf(2, surroundings),
                HasSubstr(absl::StrCat("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=",
                                       limit, " (which is not DEVICE=SIZE")));
  }
}

TEST(CudaStatusTest, AnArchitectureWithoutKernelsIsRefused) {
  EXPECT_EQ(CheckArchitecture(8, 0, 80), absl::OkStatus());
  EXPECT_EQ(CheckArchitecture(9, 0, 80), absl::OkStatus());
  EXPECT_EQ(CheckArchitecture(12, 1, 80), absl::OkStatus());
  const absl::Status refused = CheckArchitecture(7, 5, 80);
  EXPECT_EQ(refused.code(), Code::kFailedPrecondition);
  EXPECT_THAT(refused.message(), AllOf(HasSubstr("compute capability is 7.5"),
                                       HasSubstr("8.0 and later"),
                                       HasSubstr("CUDA_VISIBLE_DEVICES")));
}

class CudaEnvironmentTest : public testing::Test {
 protected:
  CudaEnvironmentTest() { Clear(); }
  ~CudaEnvironmentTest() override { Clear(); }

 private:
  static void Clear() {
    for (const char* name : {"CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY",
                             "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
                             "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"}) {
      ::unsetenv(name);
    }
  }
};

TEST_F(CudaEnvironmentTest, IsReadAsItIs) {
  const CudaSurroundings none = ReadCudaEnvironment();
  EXPECT_FALSE(none.visible_devices.has_value());
  EXPECT_FALSE(none.mps_pipe_directory.has_value());
  EXPECT_FALSE(none.mps_thread_percentage.has_value());
  EXPECT_FALSE(none.mps_memory_limit.has_value());
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
  ::setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps", 1);
  ::setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50", 1);
  ::setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=8G", 1);
  const CudaSurroundings all = ReadCudaEnvironment();
  EXPECT_EQ(all.visible_devices.value_or("unset"), "");
  EXPECT_EQ(all.mps_pipe_directory.value_or("unset"), "/run/mps");
  EXPECT_EQ(all.mps_thread_percentage.value_or("unset"), "50");
  EXPECT_EQ(all.mps_memory_limit.value_or("unset"), "0=8G");
}

}  // namespace
}  // namespace optstate::accelerator
