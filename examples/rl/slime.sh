# Arguments of SGLang in a run script of slime: source this file there, and give "${SGLANG_ARGS[@]}" to slime_train.py
# in the place of train.py.
SGLANG_ARGS=(
    --sglang-sampling-backend flashsample
    --sglang-mem-fraction-static 0.7
)
