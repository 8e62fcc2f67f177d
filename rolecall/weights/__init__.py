"""The weight channel: policy parameters from the actor to every rollout worker, versioned by epochs, fingerprinted,
abortable.

Versions never go back. The rule is one script of the ledger, begin_publish: a version that it accepted once is higher
than all before, whatever became of its publish. The last one goes out again, over another epoch, to receivers that
joined later; the script attest holds them to the digest that the others have. Everybody else who holds a version checks
again, as a guard at a border of trust, because calls may come late, twice or from a controller that was replaced:

    PolicyPublisher        controller/publish/publisher.py   asks for versions in order
    ActorRanks.publish     actor/ranks.py                    its checkpoint remembers the version across restarts
    Publisher.publish      weights/publisher.py              one process of the actor, on any thread
    HeldWeights            rollout/state.py                  one replica, before anything is paused
    Receiver               weights/receiver.py               one worker, before anything is touched
"""
