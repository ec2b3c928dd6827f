#include "proto/tls/tls_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "proto/tls/test_certificates.h"

namespace optstate::tls {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class TlsStreamTest : public testing::Test {
 protected:
  const std::string directory_ = ::testing::TempDir();
  const TestCa ca_{directory_, "ca"};
  const TestCa other_ca_{directory_, "other-ca"};
  TlsFiles daemon_ = ca_.Issue("daemon", "DNS:node7,IP:127.0.0.1");
  TlsFiles client_ =
      ca_.Issue("client", "URI:spiffe://cluster/trainer,DNS:rank,email:a@b.c");

  void Connect(const std::string& name = "node7") {
    const auto server_context = TlsContext::Server(daemon_);
    ASSERT_TRUE(server_context.ok()) << server_context.status();
    const auto client_context = TlsContext::Client(client_);
    ASSERT_TRUE(client_context.ok()) << client_context.status();
    server_ = *TlsStream::Accept(*server_context);
    auto stream = TlsStream::Connect(*client_context, name);
    ASSERT_TRUE(stream.ok()) << stream.status();
    of_client_ = *std::move(stream);
    // An even number of turns, so that both sides have heard everything.
    for (int i = 0; i < 8; ++i) {
      if (client_error_.ok()) client_error_ = of_client_->Handshake();
      Move(of_client_.get(), server_.get());
      if (server_error_.ok()) server_error_ = server_->Handshake();
      Move(server_.get(), of_client_.get());
    }
  }

  static void Move(TlsStream* from, TlsStream* to) {
    to->TakeEncrypted(std::exchange(from->output(), ""));
  }

  static std::string Decrypted(TlsStream* stream) {
    std::string plain;
    EXPECT_TRUE(stream->Decrypt(1 << 20, &plain).ok());
    return plain;
  }

  std::unique_ptr<TlsStream> server_;
  std::unique_ptr<TlsStream> of_client_;
  absl::Status server_error_;
  absl::Status client_error_;
};

TEST_F(TlsStreamTest, BothSidesSeeTheOtherOnesNames) {
  Connect();
  ASSERT_TRUE(server_error_.ok()) << server_error_;
  ASSERT_TRUE(client_error_.ok()) << client_error_;
  EXPECT_TRUE(server_->is_ready());
  EXPECT_TRUE(of_client_->is_ready());
  EXPECT_THAT(server_->peer_names(), ElementsAre("URI:spiffe://cluster/trainer",
                                                 "DNS:rank", "EMAIL:a@b.c"));
  EXPECT_THAT(of_client_->peer_names(),
              ElementsAre("DNS:node7", "IP:127.0.0.1"));
  ASSERT_TRUE(of_client_->Encrypt("hello").ok());
  EXPECT_THAT(of_client_->output(), testing::Not(HasSubstr("hello")));
  Move(of_client_.get(), server_.get());
  EXPECT_EQ(Decrypted(server_.get()), "hello");
  EXPECT_FALSE(server_->is_closed_by_peer());
  of_client_->Close();
  Move(of_client_.get(), server_.get());
  EXPECT_EQ(Decrypted(server_.get()), "");
  EXPECT_TRUE(server_->is_closed_by_peer());
  // The other direction goes on.
  ASSERT_TRUE(server_->Encrypt("still there").ok());
  Move(server_.get(), of_client_.get());
  EXPECT_EQ(Decrypted(of_client_.get()), "still there");
}

TEST_F(TlsStreamTest, AnAddressIsANameToo) {
  Connect("127.0.0.1");
  EXPECT_TRUE(client_error_.ok()) << client_error_;
  EXPECT_TRUE(of_client_->is_ready());
}

TEST_F(TlsStreamTest, WrongName) {
  Connect("node8");
  EXPECT_TRUE(absl::IsUnauthenticated(client_error_)) << client_error_;
  EXPECT_THAT(
      std::string(client_error_.message()),
      AllOf(HasSubstr("daemon's certificate"), HasSubstr("\"node8\""),
            HasSubstr("DNS:node7"), HasSubstr("OPTSTATE_TLS_SERVER_NAME")));
  EXPECT_FALSE(server_error_.ok());
}

TEST_F(TlsStreamTest, ExpiredCertificateOfTheDaemon) {
  daemon_ = ca_.Issue("daemon", "DNS:node7", absl::Now() - absl::Hours(1));
  Connect();
  EXPECT_TRUE(absl::IsUnauthenticated(client_error_)) << client_error_;
  EXPECT_THAT(std::string(client_error_.message()),
              HasSubstr("the daemon's certificate has expired"));
  EXPECT_THAT(std::string(server_error_.message()),
              AllOf(HasSubstr("daemon.crt"), HasSubstr("expired")));
}

TEST_F(TlsStreamTest, WrongCaOfTheDaemon) {
  daemon_ = other_ca_.Issue("daemon", "DNS:node7");
  daemon_.ca = ca_.file();
  Connect();
  EXPECT_TRUE(absl::IsUnauthenticated(client_error_)) << client_error_;
  EXPECT_THAT(std::string(client_error_.message()),
              HasSubstr("the daemon's certificate is not signed by a CA of"));
}

// The client learns of these only after its own handshake is over.
TEST_F(TlsStreamTest, ExpiredCertificateOfTheClient) {
  client_ = ca_.Issue("client", "DNS:rank", absl::Now() - absl::Hours(1));
  Connect();
  EXPECT_TRUE(absl::IsUnauthenticated(client_error_)) << client_error_;
  EXPECT_THAT(std::string(client_error_.message()),
              AllOf(HasSubstr("this client's certificate"),
                    HasSubstr("client.crt"), HasSubstr("expired")));
  EXPECT_FALSE(of_client_->is_ready());
  EXPECT_THAT(std::string(server_error_.message()),
              HasSubstr("the client's certificate has expired"));
}

TEST_F(TlsStreamTest, ACertificateOfTheClientThatIsNotValidYet) {
  client_ = ca_.Issue("client", "DNS:rank", absl::Now() + absl::Hours(48),
                      absl::Now() + absl::Hours(24));
  Connect();
  EXPECT_TRUE(absl::IsUnauthenticated(client_error_)) << client_error_;
  EXPECT_THAT(std::string(client_error_.message()),
              AllOf(HasSubstr("client.crt"), HasSubstr("is not valid before"),
                    HasSubstr("clocks")));
  EXPECT_THAT(std::string(server_error_.message()),
              HasSubstr("the client's certificate is not valid yet"));
}

TEST_F(TlsStreamTest, WrongCaOfTheClient) {
  client_ = other_ca_.Issue("client", "DNS:rank");
  client_.ca = ca_.file();
  Connect();
  EXPECT_TRUE(absl::IsUnauthenticated(client_error_)) << client_error_;
  EXPECT_THAT(std::string(client_error_.message()),
              HasSubstr("not signed by a CA that the other side trusts"));
  EXPECT_THAT(std::string(server_error_.message()),
              HasSubstr("the client's certificate is not signed by a CA of"));
}

// Such as a CA that was made anew under its old name.
TEST_F(TlsStreamTest, ACaOfTheSameNameWithAnotherKey) {
  client_ = other_ca_.Issue("client", "DNS:rank");
  client_.ca = ca_.file();
  daemon_.ca = other_ca_.file();
  const TestCa anew(directory_, "other-ca");  // in the file's place
  Connect();
  EXPECT_TRUE(absl::IsUnauthenticated(client_error_)) << client_error_;
  EXPECT_THAT(std::string(client_error_.message()),
              HasSubstr("not signed by a CA that the other side trusts"));
  EXPECT_THAT(std::string(server_error_.message()),
              HasSubstr("the client's certificate is not signed by a CA of"));
}

TEST_F(TlsStreamTest, NoCertificateOfTheClient) {
  client_ = {.certificate = "", .key = "", .ca = ca_.file()};
  Connect();
  EXPECT_TRUE(absl::IsUnauthenticated(client_error_)) << client_error_;
  EXPECT_THAT(std::string(client_error_.message()),
              HasSubstr("requires a client certificate"));
  EXPECT_THAT(std::string(server_error_.message()),
              HasSubstr("has shown no certificate"));
}

TEST_F(TlsStreamTest, ADaemonWithoutCasAsksForNone) {
  daemon_.ca = "";
  client_ = {.certificate = "", .key = "", .ca = ca_.file()};
  Connect();
  EXPECT_TRUE(client_error_.ok()) << client_error_;
  EXPECT_TRUE(of_client_->is_ready());
  EXPECT_TRUE(server_->peer_names().empty());
}

TEST_F(TlsStreamTest, WhatIsNoTls) {
  Connect();
  auto stream = *TlsStream::Accept(*TlsContext::Server(daemon_));
  stream->TakeEncrypted("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
  EXPECT_FALSE(stream->Handshake().ok());
}

TEST_F(TlsStreamTest, FilesThatCannotBeUsedAreNamed) {
  TlsFiles files = daemon_;
  files.key = client_.key;
  EXPECT_THAT(std::string(TlsContext::Server(files).status().message()),
              AllOf(HasSubstr("client.key"), HasSubstr("does not belong to")));
  files.key = directory_ + "/none";
  const absl::Status missing = TlsContext::Server(files).status();
  EXPECT_TRUE(absl::IsNotFound(missing)) << missing;
  EXPECT_THAT(std::string(missing.message()), HasSubstr("key "));
  files = daemon_;
  files.ca = directory_ + "/text";
  std::ofstream(files.ca) << "no certificate\n";
  const absl::Status text = TlsContext::Server(files).status();
  EXPECT_TRUE(absl::IsInvalidArgument(text)) << text;
  EXPECT_THAT(std::string(text.message()), HasSubstr(files.ca));
  EXPECT_FALSE(TlsContext::Client({.certificate = daemon_.certificate}).ok());
}

}  // namespace
}  // namespace optstate::tls
