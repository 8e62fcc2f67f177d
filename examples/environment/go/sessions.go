// The sessions of an environment: what rolecall/v1/environment.proto asks of any server, around an episode.
package main

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	pb "rolecall/v1"
)

// One episode. Its methods are called one at a time; what one returns as an error, or panics with, ends it.
type episode interface {
	reset(task *pb.Task, seed int64) (*pb.ResetResponse, error)
	step(action *pb.Action) (*pb.StepResponse, error)
	grade() *pb.EpisodeReward
}

// Work that goes on whoever waits for it, and what came of it.
type promise[T any] struct {
	done   chan struct{}
	answer T
	err    error
}

func promised[T any](work func() (T, error)) *promise[T] {
	made := &promise[T]{done: make(chan struct{})}
	go func() {
		defer close(made.done)
		defer func() {
			if cause := recover(); cause != nil {
				made.err = status.Errorf(codes.Internal, "the episode failed: %v", cause)
			}
		}()
		made.answer, made.err = work()
	}()
	return made
}

func (made *promise[T]) isDone() bool {
	select {
	case <-made.done:
		return true
	default:
		return false
	}
}

func (made *promise[T]) wait(ctx context.Context) (answer T, err error) {
	select {
	case <-made.done:
		return made.answer, made.err
	case <-ctx.Done(): // the caller left; the work goes on
		return answer, status.FromContextError(ctx.Err()).Err()
	}
}

type session struct {
	name, group string
	fence, turn int64
	action      *pb.Action
	env         episode
	booting     *promise[*pb.ResetResponse]
	answer      *promise[*pb.StepResponse] // of the last turn
	numCalls    int
	calledAt    time.Time
}

func (open *session) isWorking() bool {
	return !open.booting.isDone() || open.answer != nil && !open.answer.isDone()
}

func (open *session) failure() error {
	if open.answer != nil && open.answer.isDone() {
		return open.answer.err
	}
	if open.booting.isDone() {
		return open.booting.err
	}
	return nil
}

func (open *session) isOver() bool {
	return open.answer != nil && open.answer.isDone() && open.answer.err == nil &&
		open.answer.answer.State != pb.EpisodeState_EPISODE_STATE_CONTINUES
}

type closed struct {
	answer *promise[*pb.CloseResponse] // nil: closed before it was opened
	until  time.Time
}

type fenced struct {
	highest int64
	until   time.Time
}

type sessions struct {
	pb.UnimplementedEnvironmentServiceServer
	described *pb.DescribeEnvironmentResponse
	make      func() episode
	mutex     sync.Mutex // of everything below, and of the fields of sessions
	open      map[string]*session
	closed    map[string]closed
	fences    map[string]fenced
}

func newSessions(described *pb.DescribeEnvironmentResponse, make_ func() episode) *sessions {
	made := &sessions{
		described: described,
		make:      make_,
		open:      map[string]*session{},
		closed:    map[string]closed{},
		fences:    map[string]fenced{},
	}
	go func() {
		for {
			time.Sleep(minimum(time.Second, made.lease()/4))
			made.reap()
		}
	}()
	return made
}

func (all *sessions) Describe(
	context.Context, *pb.DescribeEnvironmentRequest,
) (*pb.DescribeEnvironmentResponse, error) {
	return all.described, nil
}

func (all *sessions) Reset(ctx context.Context, request *pb.ResetRequest) (*pb.ResetResponse, error) {
	all.mutex.Lock()
	defer all.mutex.Unlock()
	found := all.open[request.Session]
	if found == nil {
		var err error
		if found, err = all.begin(request); err != nil {
			return nil, err
		}
	}
	if err := found.failure(); err != nil {
		return nil, err
	}
	return calling(ctx, all, found, found.booting)
}

func (all *sessions) begin(request *pb.ResetRequest) (*session, error) {
	if _, known := all.closed[request.Session]; known {
		return nil, status.Error(codes.NotFound, "this session was closed")
	}
	if request.Fence < all.noteFence(request.Group, request.Fence) {
		return nil, status.Error(codes.FailedPrecondition, "a newer claim was here")
	}
	if most := int(all.described.MaxSessions); most > 0 && len(all.open) >= most {
		return nil, status.Error(codes.ResourceExhausted, "all sessions are open")
	}
	made := &session{name: request.Session, group: request.Group, fence: request.Fence, env: all.make()}
	made.calledAt = time.Now()
	made.booting = promised(func() (*pb.ResetResponse, error) { return made.env.reset(request.Task, request.Seed) })
	all.open[made.name] = made
	return made, nil
}

func (all *sessions) Step(ctx context.Context, request *pb.StepRequest) (*pb.StepResponse, error) {
	all.mutex.Lock()
	defer all.mutex.Unlock()
	found := all.open[request.Session]
	if found == nil {
		return nil, status.Error(codes.NotFound, "there is no such session")
	}
	if found.answer != nil && request.Turn == found.turn && proto.Equal(request.Action, found.action) {
		return calling(ctx, all, found, found.answer)
	}
	if err := found.failure(); err != nil {
		return nil, err
	}
	if found.isWorking() || found.isOver() || request.Turn != found.turn+1 {
		return nil, status.Errorf(codes.FailedPrecondition, "turn %d was asked for after %d", request.Turn, found.turn)
	}
	found.turn, found.action = request.Turn, request.Action
	found.answer = promised(func() (*pb.StepResponse, error) { return found.env.step(request.Action) })
	return calling(ctx, all, found, found.answer)
}

func (all *sessions) Close(ctx context.Context, request *pb.CloseRequest) (*pb.CloseResponse, error) {
	all.mutex.Lock()
	known, isKnown := all.closed[request.Session]
	if found := all.open[request.Session]; found != nil {
		known = all.end(found, request.Grade)
	} else if !isKnown && !request.Grade {
		all.closed[request.Session] = closed{until: all.later()} // a Reset that comes late opens nothing
	}
	all.mutex.Unlock()
	if known.answer != nil {
		return known.answer.wait(ctx)
	}
	if request.Grade {
		return nil, status.Error(codes.NotFound, "there is no such session")
	}
	return &pb.CloseResponse{}, nil
}

func (all *sessions) CloseOlder(
	_ context.Context, request *pb.CloseOlderRequest,
) (*pb.CloseOlderResponse, error) {
	all.mutex.Lock()
	defer all.mutex.Unlock()
	all.noteFence(request.Group, request.Fence)
	response := &pb.CloseOlderResponse{}
	for _, found := range all.open {
		if found.group == request.Group && found.fence < request.Fence {
			all.end(found, false)
			response.NumClosed++
		}
	}
	return response, nil
}

func (all *sessions) end(found *session, grade bool) closed {
	delete(all.open, found.name)
	answer := promised(func() (*pb.CloseResponse, error) {
		<-found.booting.done // what is under way ends first
		if found.answer != nil {
			<-found.answer.done
		}
		if err := found.failure(); err != nil && grade {
			return nil, err
		}
		if !grade || all.described.Reward == nil {
			return &pb.CloseResponse{}, nil
		}
		return &pb.CloseResponse{Reward: found.env.grade()}, nil
	})
	all.closed[found.name] = closed{answer, all.later()}
	return all.closed[found.name]
}

// Waits for a session's work without the mutex, which is held before and after.
func calling[T any](ctx context.Context, all *sessions, found *session, work *promise[T]) (T, error) {
	found.numCalls++
	all.mutex.Unlock()
	answer, err := work.wait(ctx)
	all.mutex.Lock()
	found.numCalls--
	found.calledAt = time.Now()
	return answer, err
}

func (all *sessions) reap() {
	all.mutex.Lock()
	defer all.mutex.Unlock()
	now := time.Now()
	for _, found := range all.open {
		if found.isWorking() {
			found.calledAt = now // nobody may wait for it, and its lease begins with its end
		} else if found.numCalls == 0 && now.Sub(found.calledAt) > all.lease() {
			all.end(found, false)
		}
	}
	for name, known := range all.closed {
		if known.until.Before(now) {
			delete(all.closed, name)
		}
	}
	for group, known := range all.fences {
		if known.until.Before(now) {
			delete(all.fences, group)
		}
	}
}

func (all *sessions) noteFence(group string, fence int64) int64 {
	if known, isKnown := all.fences[group]; isKnown && known.highest > fence {
		fence = known.highest
	}
	all.fences[group] = fenced{fence, all.later()}
	return fence
}

func (all *sessions) lease() time.Duration {
	return time.Duration(all.described.LeaseS * float64(time.Second))
}

func (all *sessions) later() time.Time {
	return time.Now().Add(2 * all.lease())
}

func minimum(one, other time.Duration) time.Duration {
	if one < other {
		return one
	}
	return other
}
