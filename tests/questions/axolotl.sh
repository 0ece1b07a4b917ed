axolotl train axolotl.yml --micro-batch-size 1
