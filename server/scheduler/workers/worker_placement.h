#ifndef OPTSTATE_SERVER_SCHEDULER_WORKERS_WORKER_PLACEMENT_H_
#define OPTSTATE_SERVER_SCHEDULER_WORKERS_WORKER_PLACEMENT_H_

#include <string>
#include <vector>

#include "server/scheduler/workers/cpu_topology.h"

namespace optstate::scheduler {

// The places where the participants of a WorkerPool work.
struct WorkerPlacement {
  struct Seat {
    int node = 0;           // of the participant's memory
    std::vector<int> cpus;  // its thread's processors; empty: not bound
  };
  // Seats by participant; participants of one node are neighbours. The first is
  // the caller of the pool, whose thread is never bound. Empty: the placement
  // is unknown.
  std::vector<Seat> seats;
  std::string description;  // for the log

  bool several_nodes() const {
    return !seats.empty() && seats.front().node != seats.back().node;
  }
};

enum class Pinning { kAuto, kNever, kAlways };

struct PlacementRequest {
  int workers = 1;
  std::vector<CpuNode> nodes;  // with the processors that we may use
  int online_cpus = 0;         // of the whole machine
  int quota_cores = 0;         // processors' worth of time that we may use
  Pinning pinning = Pinning::kAuto;
};

// Spreads the workers evenly over the processors. A worker is bound
//   to no processor  when a CPU quota gives less time than the processors have:
//                    the time is best spent where one happens to be idle; when
//                    there are more workers than processors; with kNever;
//   to one           when each has its own, and the processors are ours: a
//                    cpuset or an affinity mask sets them apart from the rest
//                    of the machine, or kAlways says so. Elsewhere a trainer
//                    thread may be running there, and both would wait for each
//                    other while another processor idles;
//   to its node      else, when there are several, so that its memory stays
//                    near and the kernel can still evade others' threads.
WorkerPlacement PlaceWorkers(const PlacementRequest& request);

// Places workers for this process as it is now.
WorkerPlacement PlaceWorkersHere(int workers, Pinning pinning);

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_WORKERS_WORKER_PLACEMENT_H_
