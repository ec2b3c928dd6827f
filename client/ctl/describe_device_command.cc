#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/ctl/command.h"
#include "client/ctl/job_settings.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

void AddUse(const v1::DeviceUse& use, Table& table) {
  table.AddRow({"    buffers", absl::StrCat(use.buffers(), ", ",
                                            HumanBytes(use.buffer_bytes()),
                                            "; as much pinned on the host")});
  if (use.resident_bytes() > 0) {
    table.AddRow({"    resident",
                  ResidentText(use.resident_elements(), use.resident_bytes())});
  }
  if (use.shared_bytes() > 0) {
    table.AddRow({"    for ranks", absl::StrCat(HumanBytes(use.shared_bytes()),
                                                " for their parameters")});
  }
  if (use.gradient_bytes() > 0 || use.refused_elements() > 0) {
    std::string text = absl::StrCat(HumanBytes(use.gradient_bytes()),
                                    " of gradients, which ranks had there");
    if (use.refused_elements() > 0) {
      absl::StrAppend(&text, "; OTHERS than in host memory: ",
                      HumanCount(use.refused_elements()), " elements");
    }
    table.AddRow({"    from ranks", text});
  }
  table.AddRow(
      {"    updated", absl::StrCat(HumanCount(use.elements()), " elements")});
  table.AddRow(
      {"    copied", absl::StrCat(HumanBytes(use.bytes_to_device()), " there, ",
                                  HumanBytes(use.bytes_to_host()), " back")});
  table.AddRow(
      {"    lately",
       use.elements_per_s() > 0
           ? absl::StrFormat("%.3g million elements/s, %.2f GB/s copied",
                             use.elements_per_s() / 1e6,
                             use.copied_bytes_per_s() / 1e9)
           : "nothing"});
  if (use.is_lost()) {
    table.AddRow({"    LOST",
                  "the CPU does its share until the engine is "
                  "another"});
  }
  if (!use.problem().empty()) table.AddRow({"    problem", use.problem()});
}

absl::Status Run(const Context& context) {
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(const v1::DescribeDevicesReply reply,
                            client->DescribeDevices());
  Table table({{"DEVICES"}, {reply.setting()}});
  for (const v1::DeviceReport& device : reply.devices()) {
    table.AddRow({absl::StrCat("device ", device.index()), device.name()});
    table.AddRow({"  memory", HumanBytes(device.memory_bytes())});
    for (const v1::DeviceJob& job : device.jobs()) {
      table.AddRow({absl::StrCat("  job ", job.job()),
                    OffloadText(job.offload_fraction())});
      AddUse(job.use(), table);
    }
  }
  if (!reply.note().empty()) table.AddRow({"none", reply.note()});
  return PrintAnswered(context, reply, table);
}

}  // namespace

void AddDescribeDevice(CLI::App& describe, Context& context) {
  CLI::App* device = describe.add_subcommand(
      "device",
      "Devices that update elements: memory, jobs with their buffers, what "
      "stays there, throughput, errors");
  device->callback(
      [&context] { context.run = [&context] { return Run(context); }; });
}

}  // namespace optstate::ctl
