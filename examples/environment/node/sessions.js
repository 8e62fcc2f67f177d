// The sessions of an environment: what rolecall/v1/environment.proto asks of any server, around a class with reset,
// step and grade. JavaScript runs one thing at a time, so that only what is awaited can be overtaken.
const grpc = require('@grpc/grpc-js');

const failure = (code, message) => Object.assign(new Error(message), { code: grpc.status[code] });
const kept = (promise) => {
  promise.catch(() => {}); // callers may have left; a failure is then nobody's
  return promise;
};

class Sessions {
  constructor(make, described) {
    this.make = make;
    this.described = described;
    this.open = new Map();
    this.closed = new Map(); // name -> what Close answers, and until when it is known
    this.fences = new Map(); // group -> the highest fence, and until when it is known
    setInterval(() => this.reap(), Math.min(1000, 250 * described.lease_s)).unref();
  }

  methods() {
    const answered = (work) => async (call, reply) => {
      try {
        reply(null, await work(call.request));
      } catch (error) {
        reply({ code: error.code ?? grpc.status.INTERNAL, details: error.message });
      }
    };
    return {
      Describe: answered(() => this.described),
      Reset: answered((request) => this.reset(request)),
      Step: answered((request) => this.step(request)),
      Close: answered((request) => this.close(request)),
      CloseOlder: answered((request) => this.closeOlder(request)),
    };
  }

  reset(request) {
    const session = this.open.get(request.session) ?? this.begin(request);
    if (session.error) throw session.error;
    return this.calling(session, session.booting);
  }

  begin(request) {
    if (this.closed.has(request.session)) throw failure('NOT_FOUND', 'this session was closed');
    const fence = BigInt(request.fence);
    if (fence < this.noteFence(request.group, fence)) throw failure('FAILED_PRECONDITION', 'a newer claim was here');
    const most = this.described.max_sessions || Infinity; // 0: no limit
    if (this.open.size >= most) throw failure('RESOURCE_EXHAUSTED', 'all sessions are open');
    const session = { group: request.group, fence, turn: 0n, numCalls: 0, env: this.make() };
    session.booting = this.work(session, () => session.env.reset(request.task, BigInt(request.seed)));
    this.open.set(request.session, session);
    return session;
  }

  step(request) {
    const session = this.open.get(request.session);
    if (!session) throw failure('NOT_FOUND', 'there is no such session');
    const [turn, action] = [BigInt(request.turn), JSON.stringify(request.action)];
    if (session.answer && turn === session.turn && action === session.action) {
      return this.calling(session, session.answer);
    }
    if (session.error) throw session.error;
    if (session.isWorking || session.isOver || turn !== session.turn + 1n) {
      throw failure('FAILED_PRECONDITION', `turn ${turn} was asked for after turn ${session.turn}`);
    }
    [session.turn, session.action] = [turn, action];
    session.answer = this.work(session, async () => {
      const answer = await session.env.step(request.action);
      session.isOver = answer.state !== 'EPISODE_STATE_CONTINUES';
      return answer;
    });
    return this.calling(session, session.answer);
  }

  close(request) {
    const session = this.open.get(request.session);
    if (session) return this.end(request.session, session, request.grade);
    const known = this.closed.get(request.session);
    if (request.grade && !known?.answer) throw failure('NOT_FOUND', 'there is no such session');
    if (!known) this.closed.set(request.session, { until: this.later() }); // a Reset that comes late opens nothing
    return known?.answer ?? {};
  }

  closeOlder(request) {
    const fence = BigInt(request.fence);
    this.noteFence(request.group, fence);
    const older = [...this.open].filter(([, session]) => session.group === request.group && session.fence < fence);
    older.forEach(([name, session]) => this.end(name, session, false));
    return { num_closed: older.length };
  }

  end(name, session, grade) {
    this.open.delete(name);
    const answer = kept(this.graded(session, grade));
    this.closed.set(name, { answer, until: this.later() });
    return answer;
  }

  async graded(session, grade) {
    await (session.answer ?? session.booting).catch(() => {});
    if (!grade) return {};
    if (session.error) throw session.error;
    return this.described.reward ? { reward: await session.env.grade() } : {};
  }

  work(session, call) {
    session.isWorking = true;
    return kept(
      (async () => {
        try {
          return await call();
        } catch (error) {
          session.error = error;
          throw error;
        } finally {
          session.isWorking = false;
        }
      })(),
    );
  }

  async calling(session, promise) {
    session.numCalls += 1;
    try {
      return await promise;
    } finally {
      session.numCalls -= 1;
      session.calledAt = Date.now();
    }
  }

  reap() {
    const now = Date.now();
    for (const [name, session] of this.open) {
      const isIdle = session.numCalls === 0 && !session.isWorking;
      if (isIdle && now - session.calledAt > 1000 * this.described.lease_s) this.end(name, session, false);
    }
    for (const known of [this.closed, this.fences]) {
      for (const [name, { until }] of known) if (until < now) known.delete(name);
    }
  }

  noteFence(group, fence) {
    const known = this.fences.get(group)?.fence ?? fence;
    const highest = known > fence ? known : fence;
    this.fences.set(group, { fence: highest, until: this.later() });
    return highest;
  }

  later() {
    return Date.now() + 2000 * this.described.lease_s;
  }
}

module.exports = { Sessions, failure };
