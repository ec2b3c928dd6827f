#include "kernels/testing/ptx_module.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/testing/ptx_block.h"
#include "proto/types/status_macros.h"

namespace optstate::kernels::testing {
namespace {

absl::Status NotKnown(absl::string_view line) {
  return absl::UnimplementedError(
      absl::StrCat("PTX that the interpreter does not know: ", line));
}

// Takes the text up to a separator, or all of it, from the front.
absl::string_view TakeUntil(absl::string_view separators,
                            absl::string_view* text) {
  const size_t end = std::min(text->find_first_of(separators), text->size());
  const absl::string_view taken = text->substr(0, end);
  text->remove_prefix(std::min(end + 1, text->size()));
  return absl::StripAsciiWhitespace(taken);
}

// Reads 12, -12, 0f3F800000 (a float's bits) and 0d... (a double's).
bool ReadImmediate(absl::string_view text, uint64_t* bits) {
  if (absl::ConsumePrefix(&text, "0f") || absl::ConsumePrefix(&text, "0d")) {
    return absl::SimpleHexAtoi(text, bits);
  }
  int64_t number = 0;
  if (absl::SimpleAtoi(text, &number)) {
    *bits = static_cast<uint64_t>(number);
    return true;
  }
  return absl::SimpleAtoi(text, bits);
}

}  // namespace

std::string NameOf(const PtxInstruction& instruction) {
  return absl::StrCat("line ", instruction.line, ": ", instruction.text);
}

// Reads line by line: nvcc writes an instruction or a declaration on each.
class PtxParser {
 public:
  explicit PtxParser(PtxModule* module) : module_(*module) {}

  absl::Status Parse(absl::string_view text) {
    for (absl::string_view line : absl::StrSplit(text, '\n')) {
      ++line_;
      line = absl::StripAsciiWhitespace(line.substr(0, line.find("//")));
      OPTSTATE_RETURN_IF_ERROR(ParseLine(line));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status ParseLine(absl::string_view line) {
    if (line.empty() || line == "{" || line == ")") return absl::OkStatus();
    const size_t entry = line.find(".entry ");
    if (entry != absl::string_view::npos) {
      absl::string_view name = line.substr(entry + 7);
      Begin(TakeUntil("(", &name));
      return absl::OkStatus();
    }
    if (line == "}") return End();
    if (absl::StartsWith(line, ".")) return ParseDeclaration(line);
    if (kernel_ == nullptr) return NotKnown(line);
    if (absl::EndsWith(line, ":")) {
      labels_[std::string(line.substr(0, line.size() - 1))] =
          kernel_->instructions.size();
      return absl::OkStatus();
    }
    return ParseInstruction(line);
  }

  void Begin(absl::string_view name) {
    kernel_ = &module_.kernels_[std::string(name)];
    registers_.clear();
    labels_.clear();
    branches_.clear();
    shared_.clear();
    parameters_.clear();
  }

  absl::Status End() {
    for (const auto& [instruction, label] : branches_) {
      const auto target = labels_.find(label);
      if (target == labels_.end()) return NotKnown(label);
      kernel_->instructions[instruction].target = target->second;
    }
    kernel_->registers = registers_.size();
    kernel_->parameters = parameters_.size();
    kernel_ = nullptr;
    return absl::OkStatus();
  }

  absl::Status ParseDeclaration(absl::string_view line) {
    for (const absl::string_view ignored :
         {".version", ".target", ".address_size", ".maxntid", ".reg",
          ".pragma"}) {
      if (absl::StartsWith(line, ignored)) return absl::OkStatus();
    }
    if (absl::StartsWith(line, ".param")) {
      parameters_.emplace(
          absl::StripSuffix(line.substr(line.rfind(' ') + 1), ","),
          parameters_.size());
      return absl::OkStatus();
    }
    const bool is_shared = absl::StartsWith(line, ".shared");
    const size_t type = line.find(".b8 ");
    if ((!is_shared && !absl::StartsWith(line, ".global")) ||
        type == absl::string_view::npos) {
      return NotKnown(line);
    }
    absl::string_view rest = line.substr(type + 4);
    const std::string name(TakeUntil("[", &rest));
    size_t bytes = 0;
    if (!absl::SimpleAtoi(TakeUntil("]", &rest), &bytes)) return NotKnown(line);
    if (is_shared) {
      constexpr size_t kAlignBytes = 16;
      const size_t begin =
          (kernel_->shared_bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
      shared_[name] = begin;
      kernel_->shared_bytes = begin + bytes;
      return absl::OkStatus();
    }
    std::vector<uint8_t>& values = module_.globals_[name];
    const size_t begin = rest.find('{');
    if (begin != absl::string_view::npos) {
      rest.remove_prefix(begin + 1);
      for (const absl::string_view each :
           absl::StrSplit(TakeUntil("}", &rest), ',')) {
        uint32_t value = 0;
        if (!absl::SimpleAtoi(each, &value)) return NotKnown(line);
        values.push_back(static_cast<uint8_t>(value));
      }
    }
    values.resize(bytes);
    return absl::OkStatus();
  }

  absl::Status ParseInstruction(absl::string_view line) {
    PtxInstruction instruction;
    instruction.text = std::string(line);
    instruction.line = line_;
    if (!absl::ConsumeSuffix(&line, ";")) return NotKnown(line);
    if (absl::ConsumePrefix(&line, "@")) {
      instruction.is_guard_negated = absl::ConsumePrefix(&line, "!");
      instruction.guard = static_cast<int>(RegisterOf(TakeUntil(" \t", &line)));
      line = absl::StripAsciiWhitespace(line);
    }
    const absl::string_view name = TakeUntil(" \t", &line);
    if (name == "bra" || name == "bra.uni") {
      branches_.emplace_back(kernel_->instructions.size(),
                             std::string(absl::StripAsciiWhitespace(line)));
    } else {
      instruction.handler = FindPtxHandler(name);
      if (instruction.handler == nullptr) return NotKnown(instruction.text);
      while (!line.empty()) {
        // The brackets of a vector's registers say nothing more.
        absl::string_view text = TakeUntil(",", &line);
        absl::ConsumePrefix(&text, "{");
        absl::ConsumeSuffix(&text, "}");
        OPTSTATE_ASSIGN_OR_RETURN(
            const PtxOperand operand,
            ParseOperand(absl::StripAsciiWhitespace(text)));
        instruction.operands.push_back(operand);
      }
    }
    kernel_->instructions.push_back(std::move(instruction));
    return absl::OkStatus();
  }

  absl::StatusOr<PtxOperand> ParseOperand(absl::string_view text) {
    PtxOperand operand;
    if (absl::ConsumePrefix(&text, "[")) {
      absl::string_view address = TakeUntil("]", &text);
      const absl::string_view base = TakeUntil("+", &address);
      OPTSTATE_ASSIGN_OR_RETURN(operand, ParseOperand(base));
      uint64_t offset = 0;
      if (!address.empty() && !ReadImmediate(address, &offset)) {
        return NotKnown(text);
      }
      operand.bits += offset;
      return operand;
    }
    if (text == "%tid.x") {
      operand.kind = PtxOperand::Kind::kThread;
    } else if (text == "%ctaid.x") {
      operand.kind = PtxOperand::Kind::kBlock;
    } else if (absl::StartsWith(text, "%") && !absl::StrContains(text, '.')) {
      operand.kind = PtxOperand::Kind::kRegister;
      operand.index = RegisterOf(text);
    } else if (!ReadImmediate(text, &operand.bits) &&
               !FindSymbol(std::string(text), &operand.bits)) {
      return NotKnown(text);
    }
    return operand;
  }

  bool FindSymbol(const std::string& name, uint64_t* bits) const {
    if (const auto p = parameters_.find(name); p != parameters_.end()) {
      *bits = p->second;
      return true;
    }
    if (const auto s = shared_.find(name); s != shared_.end()) {
      *bits = s->second;
      return true;
    }
    const auto global = module_.globals_.find(name);
    if (global == module_.globals_.end()) return false;
    *bits = reinterpret_cast<uint64_t>(global->second.data());
    return true;
  }

  uint32_t RegisterOf(absl::string_view name) {
    return registers_.emplace(name, static_cast<uint32_t>(registers_.size()))
        .first->second;
  }

  PtxModule& module_;
  size_t line_ = 0;
  PtxKernel* kernel_ = nullptr;
  std::map<std::string, uint32_t, std::less<>> registers_;
  std::map<std::string, size_t> labels_;
  std::vector<std::pair<size_t, std::string>> branches_;  // by instruction
  std::map<std::string, size_t> shared_;                  // offsets
  std::map<std::string, size_t> parameters_;              // places
};

absl::StatusOr<std::unique_ptr<PtxModule>> PtxModule::Parse(
    absl::string_view text) {
  auto module = std::make_unique<PtxModule>();
  OPTSTATE_RETURN_IF_ERROR(PtxParser(module.get()).Parse(text));
  return module;
}

absl::Status PtxModule::Run(const PtxKernel& kernel, uint32_t blocks,
                            uint32_t threads,
                            absl::Span<const uint64_t> arguments) {
  if (arguments.size() != kernel.parameters) {
    return absl::InvalidArgumentError(
        absl::StrCat("the kernel has ", kernel.parameters, " parameters, not ",
                     arguments.size()));
  }
  PtxBlock block(&kernel, threads, arguments);
  for (uint32_t number = 0; number < blocks; ++number) {
    OPTSTATE_RETURN_IF_ERROR(block.Run(number));
  }
  return absl::OkStatus();
}

}  // namespace optstate::kernels::testing
