// The share of the expected words that the response contains, as a RewardService.
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <csignal>
#include <iostream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "rolecall/v1/reward.grpc.pb.h"

using namespace rolecall::v1;

std::vector<std::string> WordsOf(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

void ScoreOne(const ScoreItem& item, ScoreResult* result) {
  result->set_id(item.id());
  const auto expected = WordsOf(item.ground_truth());
  if (expected.empty()) {
    result->mutable_error()->set_code("BAD_GROUND_TRUTH");
    result->mutable_error()->set_message("there is nothing to compare with");
    return;
  }
  const auto words = WordsOf(item.response_text());
  const std::set<std::string> said(words.begin(), words.end());
  double found = 0;
  for (const auto& word : expected) found += said.count(word);
  result->mutable_reward()->set_value(found / expected.size());
}

class Scorer final : public RewardService::Service {
  grpc::Status Describe(grpc::ServerContext*, const DescribeRequest*, DescribeResponse* response) override {
    response->set_name("words");
    response->add_reads(SCORE_FIELD_RESPONSE_TEXT);
    response->add_reads(SCORE_FIELD_GROUND_TRUTH);
    response->mutable_reward()->set_min(0);
    response->mutable_reward()->set_max(1);
    return grpc::Status::OK;
  }

  grpc::Status Score(grpc::ServerContext* context, const ScoreRequest* request, ScoreResponse* response) override {
    for (const auto& item : request->items()) {
      if (context->IsCancelled()) return grpc::Status::CANCELLED;  // nobody waits for the answer any more
      ScoreOne(item, response->add_results());
    }
    return grpc::Status::OK;
  }
};

int main(int argc, char** argv) {
  const std::string address = argc > 1 ? argv[1] : "127.0.0.1:50070";
  sigset_t ends;  // blocked before any thread starts, so that sigwait alone sees them
  sigemptyset(&ends);
  sigaddset(&ends, SIGTERM);
  sigaddset(&ends, SIGINT);
  pthread_sigmask(SIG_BLOCK, &ends, nullptr);

  grpc::EnableDefaultHealthCheckService(true);  // SERVING until the server shuts down
  Scorer scorer;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&scorer);
  const auto server = builder.BuildAndStart();
  if (!server || port == 0) {
    std::cerr << "cannot listen on " << address << std::endl;
    return 1;
  }
  std::cout << "words serves on " << address << std::endl;
  int number = 0;
  sigwait(&ends, &number);
  server->Shutdown();  // the calls under way are finished first
  return 0;
}
