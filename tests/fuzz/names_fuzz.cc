// Short texts that operators and peers give: addresses, endpoints, names of
// jobs and devices, sizes. Input: one text, which every parser gets.

#include <string>
#include <vector>

#include "client/ctl/job_settings.h"
#include "client/endpoint/endpoint.h"
#include "server/accept/hello_check.h"
#include "server/config/device_setting.h"
#include "server/config/job_weight.h"
#include "server/config/listen_address.h"
#include "server/config/nvme_directory.h"
#include "server/config/yaml_message.h"
#include "tests/fuzz/fuzz_target.h"

namespace optstate::fuzz {

std::vector<std::string> Seeds() {
  return {"unix:/run/optstate/optstate.sock",
          "127.0.0.1:7077",
          "[fe80::1%eth0]:7077",
          "grpc:node-7.cluster:7077",
          "grpc:unix:/tmp/x.sock",
          "gpt-2.run_1",
          "emulated:4",
          "eval-*=25",
          "/mnt/nvme0,device=/dev/nvme0n1",
          "256 MiB",
          "18446744073709551615",
          "1.5TiB",
          "directory_weights=1,2,3",
          "grace_period=1h"};
}

}  // namespace optstate::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace optstate;
  using namespace optstate::fuzz;
  const std::string text(reinterpret_cast<const char*>(data), size);
  if (accept::CheckJobName(text).ok()) {
    Require(text.find('/') == std::string::npos && text != "." && text != "..",
            "a job's name is a folder's name");
  }
  const auto address = config::ParseListenAddress(text);
  if (address.ok()) {
    Require(address->unix_path.empty() != address->host.empty() ||
                address->unix_path.empty(),
            "an address is of one kind");
  }
  if (config::CheckUnixSocketPath(text).ok()) {
    Require(text.size() < 108 && text[0] == '/', "a path fits a socket");
  }
  (void)client::ParseEndpoint(text);
  (void)config::ParseNvmeDirectory(text);
  (void)config::ParseDeviceSetting(text);
  (void)config::ParseJobWeight(text);
  (void)config::ParseByteCount(text);
  (void)ctl::ParseBytes(text);
  (void)ctl::ParseJobSettings("job", {text});
  return 0;
}
