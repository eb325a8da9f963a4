#!/bin/sh
# Measures everything in results/ that wants a GPU, in parts that can be stopped and gone on with.
#
#   sh tools/gpu_results.sh FOLDER [PART ...]
#
#   FOLDER  where the JSON files, plans and logs go
#   PART    tests    the tests marked gpu
#           sweep    the error of split products
#           kernels  what a launch costs on the CPU, and LSTM layers in every way there is
#           memory   what the GPU holds after tuning
#           aa       how often the same code is called different; goes on where it was stopped
#           compare  every workload in every column, one after the other; leaves out what is finished of the same code.
#                    COMPARE="gpt2 sdpa" is some of them
#           ddp      training on all GPUs there are
#           By default all, in this order.
#
# Nothing else should use the GPU. Environment: PYTHON (python3), COMMIT (where there is no repository to ask), DEVICE (cuda;
# cpu is for trying this out), COMPARE_ARGS (further options of case_studies.compare), TUNE_JOBS (3).
set -u
[ $# -ge 1 ] || { sed -n '2,/^set/p' "$0" | grep '^#'; exit 2; }
mkdir -p "$1" && folder=$(cd "$1" && pwd) || exit 1
shift
[ $# -ge 1 ] || set -- tests sweep kernels memory aa compare ddp
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3} device=${DEVICE:-cuda} failed=
commit=${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
given=${COMMIT:+--commit $COMMIT}  # else they ask the repository themselves, and say where the code was changed
export KINETO_LOG_LEVEL="${KINETO_LOG_LEVEL:-99}" PYTHONUNBUFFERED=1

# Runs a command, with its output in a log, of which the end is shown.
part() {
  name=$1
  shift
  echo "$(date +%T) $name"
  "$@" > "$folder/$name.log" 2>&1
  code=$?
  tail -n 4 "$folder/$name.log"
  [ $code -eq 0 ] || { echo "$name ended with exit code $code: $folder/$name.log"; failed="$failed $name"; }
}

for name in "$@"; do
  case $name in
  tests | sweep | kernels | memory | aa | compare | ddp) ;;
  *) echo "no part is called $name"; exit 2 ;;
  esac
done
for name in "$@"; do
  case $name in
  tests) part tests "$python" -m pytest -m gpu tests/gpu -v --tb=short -p no:cacheprovider ;;
  # shellcheck disable=SC2086  # $given, COMPARE and COMPARE_ARGS are lists
  sweep) part sweep "$python" -m case_studies.split_sweep --device "$device" $given --json "$folder/split_sweep.json" ;;
  kernels)
    part launches "$python" tests/benchmarks/launch_overhead_gpu.py --json "$folder/launch_overhead.json"
    part lstm "$python" tests/benchmarks/split_lstm_gpu.py --tune --json "$folder/split_lstm.json"
    ;;
  memory) part memory "$python" tools/gpu_memory.py --time-limit 15 --json "$folder/memory.json" ;;
  aa) part aa "$python" tools/aa_rounds.py --device "$device" --rounds 100 --batch 100 --json "$folder/aa_rounds.json" ;;
  compare)
    # shellcheck disable=SC2086
    part compare "$python" -m case_studies.compare ${COMPARE:-} --device "$device" $given --resume \
      --json "$folder/comparison.json" --plan-dir "$folder/plans/$commit" --tune-jobs "${TUNE_JOBS:-3}" --time-limit 400 ${COMPARE_ARGS:-}
    ;;
  ddp)
    count=$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')
    [ "$count" -gt 1 ] && fail=1 || fail=-1  # at the end, this rank is made to fail
    part ddp "$python" -m torch.distributed.run --nproc-per-node "$count" -m case_studies.ddp --device "$device" \
      --fail-rank "$fail" --json "$folder/ddp.json"
    ;;
  esac
done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
