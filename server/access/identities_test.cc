#include "server/access/identities.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace optstate::access {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

absl::StatusOr<Identities> Parse(const std::string& text) {
  return Identities::Parse(text, "i.yaml");
}

TEST(IdentitiesTest, TheFirstThatFitsCounts) {
  const auto identities = Parse(R"(identities:
- {san: "URI:spiffe://c/train/alice", user: "1001", role: operator}
- {san: "URI:spiffe://c/train/*", user: "1002", role: trainer}
- {san: "DNS:node7", user: root, role: viewer}
- {san: "IP:10.0.0.7", user: "1003", role: viewer}
)");
  ASSERT_TRUE(identities.ok()) << identities.status();
  const auto alice = identities->Find({"DNS:x", "URI:spiffe://c/train/alice"});
  ASSERT_TRUE(alice.ok()) << alice.status();
  EXPECT_EQ(alice->uid, 1001u);
  EXPECT_EQ(alice->role, Role::kOperator);
  EXPECT_EQ(alice->via, Via::kTls);
  EXPECT_EQ(alice->name(), "URI:spiffe://c/train/alice (uid 1001)");
  const auto bob = identities->Find({"URI:spiffe://c/train/bob"});
  ASSERT_TRUE(bob.ok()) << bob.status();
  EXPECT_EQ(bob->uid, 1002u);
  EXPECT_EQ(bob->role, Role::kTrainer);
  EXPECT_EQ(bob->identity, "URI:spiffe://c/train/bob");
  EXPECT_EQ(identities->Find({"DNS:node7"})->uid, 0u);
  EXPECT_EQ(identities->Find({"IP:10.0.0.7"})->uid, 1003u);
}

TEST(IdentitiesTest, WhatFitsNoneIsNobody) {
  const auto identities =
      Parse("identities: [{san: \"DNS:node7\", user: \"1\", role: viewer}]\n");
  ASSERT_TRUE(identities.ok()) << identities.status();
  // Another kind, a longer name, a part of it, and a * that is no wildcard.
  for (const char* name : {"URI:node7", "DNS:node77", "DNS:node", "DNS:node*",
                           "DNS:NODE7", "node7"}) {
    const absl::Status status = identities->Find({name}).status();
    EXPECT_TRUE(absl::IsUnauthenticated(status)) << name;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(name), HasSubstr("identities_file")));
  }
  EXPECT_THAT(std::string(identities->Find({}).status().message()),
              HasSubstr("no name"));
  EXPECT_FALSE(Parse("")->Find({"DNS:node7"}).ok());
}

TEST(IdentitiesTest, MistakesAreNamed) {
  const std::pair<const char*, const char*> kCases[] = {
      {"identities: [{san: node7, user: root, role: viewer}]", "\"node7\""},
      {"identities: [{san: \"DNS:\", user: root, role: viewer}]", "\"DNS:\""},
      {"identities: [{san: \"DNS:a\", user: root}]", "no role"},
      {"identities: [{san: \"DNS:a\", role: viewer}]", "no user"},
      {"identities: [{san: \"DNS:a\", user: \"no such user\", role: viewer}]",
       "no user \"no such user\""},
      {"identities: [{san: \"DNS:a\", user: root, role: king}]", "king"},
      {"identity: []", "identity"},
  };
  for (const auto& [text, fault] : kCases) {
    const absl::Status status = Parse(text).status();
    EXPECT_FALSE(status.ok()) << text;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("i.yaml"), HasSubstr(fault)));
  }
}

}  // namespace
}  // namespace optstate::access
