#include "kernels/cuda/test_ptx.h"

#include <cxxabi.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "gtest/gtest.h"
#include "kernels/cuda/block_kernels.h"

namespace optstate::kernels::cuda {

using kernels::testing::PtxKernel;
using kernels::testing::PtxModule;

std::string Demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(name, nullptr, nullptr, &status), &std::free);
  // Spaces between brackets differ.
  return absl::StrReplaceAll(status == 0 ? text.get() : name, {{" ", ""}});
}

TestPtx::TestPtx(const std::string& path)
    : module_(std::make_unique<PtxModule>()) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  auto parsed = PtxModule::Parse(text.str());
  EXPECT_TRUE(parsed.ok()) << path << ": " << parsed.status();
  if (parsed.ok()) module_ = *std::move(parsed);
}

const PtxKernel* TestPtx::Find(const std::string& part) const {
  for (const auto& [name, kernel] : module_->kernels()) {
    if (absl::StrContains(Demangled(name.c_str()), part)) return &kernel;
  }
  ADD_FAILURE() << "there is no kernel " << part;
  return nullptr;
}

bool RunPtx(const PtxKernel* kernel, uint64_t blocks,
            absl::Span<const uint64_t> arguments) {
  if (kernel == nullptr) return false;
  const absl::Status ran = PtxModule::Run(
      *kernel, static_cast<uint32_t>(blocks), kBlockThreads, arguments);
  EXPECT_TRUE(ran.ok()) << ran;
  return ran.ok();
}

}  // namespace optstate::kernels::cuda
