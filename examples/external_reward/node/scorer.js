// The share of the expected words that the response contains, as a RewardService. The stubs are made from the .proto
// when this starts.
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');
const { HealthImplementation } = require('grpc-health-check');

const definition = loader.loadSync('rolecall/v1/reward.proto', {
  keepCase: true,
  defaults: true, // else an empty field is undefined
  includeDirs: [path.join(__dirname, '../../../proto')],
});
const { RewardService } = grpc.loadPackageDefinition(definition).rolecall.v1;

const wordsOf = (text) => text.split(/\s+/).filter((word) => word !== '');

function result(item) {
  const expected = wordsOf(item.ground_truth);
  if (expected.length === 0) {
    return { id: item.id, error: { code: 'BAD_GROUND_TRUTH', message: 'there is nothing to compare with' } };
  }
  const said = new Set(wordsOf(item.response_text));
  const found = expected.filter((word) => said.has(word)).length;
  return { id: item.id, reward: { value: found / expected.length } };
}

const server = new grpc.Server();
const health = new HealthImplementation({ '': 'SERVING' });
health.addToServer(server);
server.addService(RewardService.service, {
  Describe: (call, reply) =>
    reply(null, {
      name: 'words',
      reads: ['SCORE_FIELD_RESPONSE_TEXT', 'SCORE_FIELD_GROUND_TRUTH'],
      reward: { min: 0, max: 1 },
    }),
  Score: (call, reply) => reply(null, { results: call.request.items.map(result) }),
});

const address = process.argv[2] || '127.0.0.1:50070';
server.bindAsync(address, grpc.ServerCredentials.createInsecure(), (error) => {
  if (error) {
    console.error(error.message);
    process.exit(1);
  }
  console.log(`words serves on ${address}`);
});
process.on('SIGTERM', () => {
  health.setStatus('', 'NOT_SERVING');
  server.tryShutdown(() => process.exit(0)); // the calls under way are finished first
});
