"""The evaluation of held-out sets on the weights of one step. Outside the ledger: nothing here is trained on."""
