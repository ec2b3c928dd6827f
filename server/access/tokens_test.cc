#include "server/access/tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace optstate::access {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// `printf %s secret | sha256sum` and that of "other".
constexpr char kText[] = R"(tokens:
- name: ci
  sha256: "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"
  user: "1001"
  role: trainer
- name: admin
  sha256: "D9298A10D1B0735837DC4BD85DAC641B0F3CEF27A47E5D53A54F2F3F5B2FCFFA"
  user: root
  role: operator
)";

TEST(TokensTest, ATokenSaysWhoShowsIt) {
  const auto tokens = Tokens::Parse(kText, "t.yaml");
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  const auto ci = tokens->Find("secret");
  ASSERT_TRUE(ci.ok()) << ci.status();
  EXPECT_EQ(ci->name(), "token:ci (uid 1001)");
  EXPECT_EQ(ci->role, Role::kTrainer);
  EXPECT_EQ(ci->via, Via::kTls);
  const auto admin = tokens->Find("other");
  ASSERT_TRUE(admin.ok()) << admin.status();
  EXPECT_EQ(admin->role, Role::kOperator);
  for (const std::string& wrong :
       {std::string(), std::string("Secret"), std::string("secret "),
        std::string(Tokens::kBytesMax + 1, 'x')}) {
    EXPECT_TRUE(absl::IsUnauthenticated(tokens->Find(wrong).status()));
  }
}

TEST(TokensTest, MistakesAreNamed) {
  const std::string digest(64, 'a');
  const std::pair<std::string, const char*> kCases[] = {
      {"tokens: [{name: a, sha256: abc, user: root, role: viewer}]", "sha256"},
      {"tokens: [{name: a, sha256: \"" + std::string(64, 'g') +
           "\", user: root, role: viewer}]",
       "sha256"},
      {"tokens: [{sha256: \"" + digest + "\", user: root, role: viewer}]",
       "no name"},
      {"tokens: [{name: a, sha256: \"" + digest + "\", user: root}]",
       "no role"},
      {"tokens: [{name: a, token: b}]", "token"},
  };
  for (const auto& [text, fault] : kCases) {
    const absl::Status status = Tokens::Parse(text, "t.yaml").status();
    EXPECT_FALSE(status.ok()) << text;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("t.yaml"), HasSubstr(fault)));
  }
}

}  // namespace
}  // namespace optstate::access
