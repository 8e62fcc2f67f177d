// The share of the expected words that the response contains, as a RewardService.
package main

import (
	"context"
	"fmt"
	"log"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	health_pb "google.golang.org/grpc/health/grpc_health_v1"
	pb "rolecall/v1"
)

type scorer struct {
	pb.UnimplementedRewardServiceServer
}

func (*scorer) Describe(context.Context, *pb.DescribeRequest) (*pb.DescribeResponse, error) {
	least, greatest := 0.0, 1.0
	return &pb.DescribeResponse{
		Name:   "words",
		Reads:  []pb.ScoreField{pb.ScoreField_SCORE_FIELD_RESPONSE_TEXT, pb.ScoreField_SCORE_FIELD_GROUND_TRUTH},
		Reward: &pb.ComponentSpec{Min: &least, Max: &greatest},
	}, nil
}

func (*scorer) Score(ctx context.Context, request *pb.ScoreRequest) (*pb.ScoreResponse, error) {
	response := &pb.ScoreResponse{}
	for _, item := range request.Items {
		if ctx.Err() != nil { // nobody waits for the answer any more
			return nil, ctx.Err()
		}
		response.Results = append(response.Results, result(item))
	}
	return response, nil
}

func result(item *pb.ScoreItem) *pb.ScoreResult {
	expected := strings.Fields(item.GroundTruth)
	if len(expected) == 0 {
		nothing := &pb.ScoreError{Code: "BAD_GROUND_TRUTH", Message: "there is nothing to compare with"}
		return &pb.ScoreResult{Id: item.Id, Outcome: &pb.ScoreResult_Error{Error: nothing}}
	}
	said := map[string]bool{}
	for _, word := range strings.Fields(item.ResponseText) {
		said[word] = true
	}
	found := 0
	for _, word := range expected {
		if said[word] {
			found++
		}
	}
	reward := &pb.Reward{Value: float64(found) / float64(len(expected))}
	return &pb.ScoreResult{Id: item.Id, Outcome: &pb.ScoreResult_Reward{Reward: reward}}
}

func main() {
	address := "127.0.0.1:50070"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		log.Fatal(err)
	}
	server, healthy := grpc.NewServer(), health.NewServer()
	pb.RegisterRewardServiceServer(server, &scorer{})
	health_pb.RegisterHealthServer(server, healthy) // SERVING from the start
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, os.Interrupt)
	go func() {
		<-ended
		healthy.Shutdown()
		server.GracefulStop() // the calls under way are finished first
	}()
	fmt.Printf("words serves on %s\n", address)
	if err := server.Serve(listener); err != nil {
		log.Fatal(err)
	}
}
