// The fields that the page reads, of the messages of proto/optstate/v1/admin.proto, with their types; one without is
// a number. "?" marks a number that may be absent. page_test.py compares this table with the .proto.
const MESSAGES = {
  NodeReport: `
    status:ServerStatus jobs:Job[] tiers:DescribeTiersReply devices:DescribeDevicesReply events:Event[]
    at:time`,
  ServerStatus: `
    version:text started_at:time draining:bool job_count session_count state_bytes
    state_bytes_available:number? instruction_set:text workers host:text
    upgrade:UpgradeProgress unanswered:UnansweredJob[] state_bytes_problem:text memory_lock:MemoryLock`,
  UpgradeProgress: "id:text done:bool engines_replaced problems:text[]",
  UnansweredJob: "name:text reason:text",
  MemoryLock: "locked_bytes pending_bytes unlocked_bytes reason:text",
  Job: `
    name:text uid phase:JobPhase reason:text optimizer:OptimizerKind parameter_count element_count
    world_size session_count ephemeral:bool committed_step
    last_outcome:StepOutcome skipped_steps created_at:time committed_at:time state_bytes engine_pid
    engine_restarts sessions:SessionInfo[] open_step:text open_load:text recovered_steps
    ranks_unknown:bool state_unknown:bool last_step_times:StepTimes
    mean_step_times:StepTimes storage:StorageSettings disk:DiskState
    memory_lock:MemoryLock device_updates:DeviceUpdates step_phases:PhaseHistogram[]`,
  StepOutcome: "step found_inf:bool gradient_norm",
  StepTimes: "staging_ns waiting_ns decide_ns update_ns publish_ns",
  PhaseHistogram: "phase:text bounds_s:number[] steps:number[] sum_s",
  StorageSettings: `
    placement:Placement durability:DurabilityKind every_steps interval_ms`,
  SessionInfo: `
    rank pid wire:text client_version:text attached_at:time committed_step staged_parameters
    gradient_bytes`,
  DiskState: `
    io_engine:text directories:text[] records frames durable_step directory_io:DirectoryIo[]
    last_verified_at:time damaged_records step_ns step_waited_ns`,
  DirectoryIo: "bytes_read bytes_written errors queue_depth busy_ns",
  DeviceUpdates: "offload_fraction device_elements cpu_elements problem:text uses:DeviceUse[] log_bytes",
  DeviceUse: `
    index name:text buffer_bytes elements elements_per_s copied_bytes_per_s problem:text is_lost:bool
    resident_bytes`,
  DescribeTiersReply: "memory:MemoryTier directories:DirectoryTier[]",
  MemoryTier: `
    capacity_bytes used_bytes free_bytes:number? problem:text budget_bytes frames_bytes bytes_per_s
    jobs:TierJob[] directory:text`,
  DirectoryTier: `
    directory:text capacity_bytes used_bytes free_bytes limit_bytes read_bytes_per_s write_bytes_per_s
    problem:text weight jobs:TierJob[]`,
  TierJob: "job:text bytes frames_bytes",
  DescribeDevicesReply: "devices:DeviceReport[] note:text unanswered:UnansweredJob[]",
  DeviceReport: "index name:text memory_bytes jobs:DeviceJob[]",
  DeviceJob: "job:text offload_fraction use:DeviceUse",
  Event: "sequence at:time severity:EventSeverity kind:text job:text actor:text text:text",
};

// Returns a value of protobuf's JSON mapping as a value of the type, with the type's default where it is absent or
// another. Only the table's fields are taken, so no other name can be read by mistake.
function decode(type, value) {
  if (type.endsWith("[]")) {
    const list = Array.isArray(value) ? value : [];
    return list.map((one) => decode(type.slice(0, -2), one)).filter((one) => one !== null);
  }
  if (type in MESSAGES) return decodeMessage(MESSAGES[type], value);
  switch (type) {
    case "text":
      return typeof value === "string" ? value : "";
    case "bool":
      return value === true;
    case "number":
      return decodeNumber(value) ?? 0;
    case "number?":
      return decodeNumber(value);
    case "time":
      return decodeTime(value);
  }
  // An enumeration. A value that the daemon has no name for is a number.
  return ["string", "number"].includes(typeof value) ? String(value) : "";
}

// Integers of 64 bits are strings in the mapping.
function decodeNumber(value) {
  if (typeof value !== "string" && typeof value !== "number") return null;
  const number = Number(value);
  return value === "" || Number.isNaN(number) ? null : number;
}

// Returns milliseconds since 1970; null: absent, or the epoch itself, which stands for "never".
function decodeTime(value) {
  const ms = typeof value === "string" ? Date.parse(value) : NaN;
  return Number.isNaN(ms) || ms === 0 ? null : ms;
}

// Returns null for a message that is absent.
function decodeMessage(fields, value) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return null;
  const message = {};
  for (const field of fields.trim().split(/\s+/)) {
    const [name, type = "number"] = field.split(":");
    message[name] = decode(type, value[name]);
  }
  return message;
}
