// Hangman as an EnvironmentService: the row's ground_truth is a word, of which each turn names a letter.
package main

import (
	"fmt"
	"log"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"unicode"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	health_pb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	pb "rolecall/v1"
)

type hangman struct {
	word    string
	said    map[string]bool
	numLeft int
}

func (game *hangman) reset(task *pb.Task, seed int64) (*pb.ResetResponse, error) {
	isOther := func(letter rune) bool { return !unicode.IsLetter(letter) && !unicode.IsDigit(letter) }
	if task.GetGroundTruth() == "" || strings.IndexFunc(task.GroundTruth, isOther) >= 0 {
		return nil, status.Error(codes.InvalidArgument, "ground_truth is the word to find, of letters and digits")
	}
	*game = hangman{word: task.GroundTruth, said: map[string]bool{}, numLeft: 6}
	return &pb.ResetResponse{Messages: game.shown()}, nil
}

func (game *hangman) step(action *pb.Action) (*pb.StepResponse, error) {
	letter := ""
	for _, first := range strings.TrimSpace(action.GetText()) {
		letter = string(first)
		break
	}
	game.said[letter] = true
	if letter == "" || !strings.Contains(game.word, letter) {
		game.numLeft--
	}
	answer := &pb.StepResponse{Messages: game.shown(), State: pb.EpisodeState_EPISODE_STATE_CONTINUES}
	if game.numLeft == 0 || game.grade().Value == 1 {
		answer.State, answer.Reward = pb.EpisodeState_EPISODE_STATE_TERMINATED, game.grade()
	}
	return answer, nil
}

func (game *hangman) shown() []*pb.Observation {
	var letters []string
	for _, letter := range game.word {
		if game.said[string(letter)] {
			letters = append(letters, string(letter))
		} else {
			letters = append(letters, "_")
		}
	}
	part := &pb.Part{Part: &pb.Part_Text{Text: strings.Join(letters, " ")}}
	return []*pb.Observation{{Role: "user", Parts: []*pb.Part{part}}}
}

func (game *hangman) grade() *pb.EpisodeReward {
	found, all := 0, 0
	for _, letter := range game.word {
		all++
		if game.said[string(letter)] {
			found++
		}
	}
	return &pb.EpisodeReward{Value: float64(found) / float64(all)}
}

func main() {
	address, leaseS := "127.0.0.1:50080", 600.0
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	if given, err := strconv.ParseFloat(os.Getenv("LEASE_S"), 64); err == nil {
		leaseS = given
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		log.Fatal(err)
	}
	least, greatest := 0.0, 1.0
	described := &pb.DescribeEnvironmentResponse{
		Name:          "hangman",
		Reward:        &pb.ComponentSpec{Min: &least, Max: &greatest},
		MaxSessions:   64,
		LeaseS:        leaseS,
		Deterministic: true,
	}
	server, healthy := grpc.NewServer(), health.NewServer()
	pb.RegisterEnvironmentServiceServer(server, newSessions(described, func() episode { return &hangman{} }))
	health_pb.RegisterHealthServer(server, healthy) // SERVING from the start
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, os.Interrupt)
	go func() {
		<-ended
		healthy.Shutdown()
		server.GracefulStop() // the calls under way are finished first
	}()
	fmt.Printf("hangman serves on %s\n", address)
	if err := server.Serve(listener); err != nil {
		log.Fatal(err)
	}
}
