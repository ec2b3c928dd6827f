#include "server/metrics/testing_reports.h"

#include <google/protobuf/text_format.h>

#include <cstdlib>
#include <iostream>

#include "absl/strings/string_view.h"

namespace optstate::metrics {
namespace {

template <typename Message>
Message Parse(const char* text) {
  Message message;
  if (google::protobuf::TextFormat::ParseFromString(text, &message)) {
    return message;
  }
  std::cerr << "not a message: " << text << "\n";
  std::abort();
}

constexpr char kHostJob[] = R"pb(
  uid: 1000
  phase: JOB_PHASE_READY
  element_count: 1000
  world_size: 2
  session_count: 2
  committed_step: 41
  committed_at { seconds: 1700000100 nanos: 500000000 }
  skipped_steps: 3
  recovered_steps: 1
  rolled_back_runs: 7
  state_bytes: 12000
  engine_pid: 4711
  engine_restarts: 1
  mean_step_times {
    steps: 16
    update_ns: 2000000000
    update_bytes: 4000
    memory_share: 0.5
  }
  memory_lock { locked_bytes: 10000 unlocked_bytes: 2000 }
  step_phases {
    phase: "update"
    bounds_s: [ 0.001, 0.1 ]
    steps: [ 1, 4, 2 ]
    sum_s: 1.25
  }
  wires {
    wire: "shm"
    gradient_bytes: 8000
    sent_bytes: 4000
    load_bytes: 12000
    refused { code: "failed_precondition" requests: 3 }
    refused { code: "aborted" requests: 2 }
    requests_waiting: 7
    replies_waiting: 6
  }
)pb";

constexpr char kMore[] = R"pb(
  disk {
    io_engine: "io_uring"
    directories: [ "/mnt/a", "/mnt/b" ]
    records: 64
    frames: 8
    frame_bytes: 4096
    durable_step: 40
    directory_io {
      bytes_read: 1000
      bytes_written: 2000
      reads: 10
      writes: 20
      syncs: 3
      errors: 1
      queue_depth: 4
      busy_ns: 1500000000
    }
    directory_io { bytes_read: 500 }
    last_verified_at { seconds: 1700000000 }
    damaged_records: 2
    scrubs: 5
    step_ns: 1000000000
    step_waited_ns: 250000000
    parameter_cache { from_frames: 11 hits: 12 misses: 13 }
  }
  wires { wire: "grpc" gradient_bytes: 80 }
  speculation { steps_begun: 9 steps_rolled_back: 2 }
  device_updates {
    cpu_elements: 300
    uses {
      index: 0
      name: "device of the test"
      buffer_bytes: 64
      elements: 700
      bytes_to_device: 2800
      bytes_to_host: 1400
      resident_bytes: 128
    }
    uses { index: 1 name: "another" is_lost: true }
  }
)pb";

constexpr char kNode[] = R"pb(
  status {
    version: "0.1.0"
    protocol_version: 3
    started_at { seconds: 1690000000 }
    draining: true
    job_count: 3
    session_count: 4
    state_bytes: 36000
    state_bytes_available: 64000
    workers: 8
    host: "node1"
    upgrade { id: "u" done: false }
    unanswered { name: "hangs" reason: "no answer" }
    memory_lock { locked_bytes: 20000 pending_bytes: 5 unlocked_bytes: 4000 }
  }
  tiers {
    memory {
      directory: "/dev/shm/optstate"
      capacity_bytes: 100000
      used_bytes: 36000
      free_bytes: 64000
      budget_bytes: 65536
      frames_bytes: 32768
      bytes_per_s: 5e10
      jobs { job: "host" bytes: 12000 }
      jobs { job: "full" bytes: 24000 frames_bytes: 32768 }
    }
    directories {
      directory: "/mnt/a"
      capacity_bytes: 1000000
      used_bytes: 5000
      free_bytes: 900000
      limit_bytes: 950000
      read_bytes_per_s: 3e9
      write_bytes_per_s: 2e9
      mixed_bytes_per_s: 2.5e9
      jobs { job: "full" bytes: 5000 }
    }
    directories { directory: "/mnt/b" problem: "No such file or directory" }
  }
  devices { devices { index: 0 name: "device of the test" memory_bytes: 8000 } }
)pb";

}  // namespace

v1::Job HostJob(const std::string& name) {
  v1::Job job = Parse<v1::Job>(kHostJob);
  job.set_name(name);
  return job;
}

v1::Job FullJob(const std::string& name) {
  v1::Job job = HostJob(name);
  job.MergeFrom(Parse<v1::Job>(kMore));
  return job;
}

v1::Job HangingJob(const std::string& name) {
  v1::Job job;
  job.set_name(name);
  job.set_engine_pid(4712);
  job.set_ranks_unknown(true);
  job.set_reason("the engine of job \"" + name + "\" gave no answer");
  job.set_engine_restarts(2);
  job.set_world_size(2);
  job.set_element_count(500);
  job.set_committed_step(12);
  job.set_state_bytes(6000);
  return job;
}

v1::NodeReport FullReport() {
  v1::NodeReport report = Parse<v1::NodeReport>(kNode);
  *report.add_jobs() = FullJob("full");
  *report.add_jobs() = HangingJob("hangs");
  *report.add_jobs() = HostJob("host");
  return report;
}

}  // namespace optstate::metrics
