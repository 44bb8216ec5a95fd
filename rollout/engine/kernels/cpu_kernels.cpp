// The functions that Python calls: sampling, attention (for a model that runs its own forward), attention over a prefix tree
// with its backward (for a trainer's own pass), the whole forward of a decoder, and its operations one at a time.

#include "cpu_attention.h"
#include "cpu_decode.h"
#include "cpu_exact.h"
#include "cpu_forward.h"
#include "cpu_sampling.h"
#include "cpu_tree_attention.h"

extern "C" {

int64_t rollout_workspace_bytes(const Model* m, int64_t count, int64_t kept, int is_bfloat16) {
    return is_bfloat16 ? Buffers<bf16>(*m, count, kept, nullptr).bytes : Buffers<float>(*m, count, kept, nullptr).bytes;
}

void rollout_forward(const Model* m, const Step* s, int is_bfloat16) {
    const team::Crew crew(s->threads);
    if (is_bfloat16) Forward<bf16>{*m, *s, crew}.run();
    else Forward<float>{*m, *s, crew}.run();
}

// Returns the number of parallel tasks.
int64_t rollout_attention(const Attention* a, int64_t threads, int is_bfloat16) {
    const std::vector<Task> tasks = plan(*a);
    const team::Crew crew(threads);
    if (is_bfloat16) attention<bf16>(*a, tasks, crew);
    else attention<float>(*a, tasks, crew);
    return static_cast<int64_t>(tasks.size());
}

void rollout_tree_forward(const tree::Attention* a, int64_t threads, int is_bfloat16) {
    const team::Crew crew(threads);
    if (is_bfloat16) tree::forward<bf16>(*a, crew);
    else tree::forward<float>(*a, crew);
}

void rollout_tree_backward(const tree::Attention* a, int64_t threads, int is_bfloat16) {
    const team::Crew crew(threads);
    if (is_bfloat16) tree::backward<bf16>(*a, crew);
    else tree::backward<float>(*a, crew);
}

// Returns the number of token ids written to `kept`.
int64_t rollout_draw(const Draw* d, int64_t threads, int is_bfloat16) {
    const team::Crew crew(threads);
    return is_bfloat16 ? draw<bf16>(*d, crew) : draw<float>(*d, crew);
}

// Returns the number of decode steps that were made.
int64_t rollout_decode(const Model* m, const Step* s, const Draw* d, const Decode* run, int is_bfloat16) {
    return is_bfloat16 ? decode<bf16>(*m, *s, *d, *run) : decode<float>(*m, *s, *d, *run);
}

void rollout_linear(const Product* p, int64_t threads, int is_bfloat16) {
    const team::Crew crew(threads);
    if (is_bfloat16) linear<bf16>(*p, crew);
    else linear<float>(*p, crew);
}

void rollout_rms_norm(const RowWise* r, int64_t threads, int is_bfloat16) {
    const team::Crew crew(threads);
    if (is_bfloat16) norm_rows<bf16>(*r, crew);
    else norm_rows<float>(*r, crew);
}

void rollout_rotate(const RowWise* r, int64_t threads, int is_bfloat16) {
    const team::Crew crew(threads);
    if (is_bfloat16) rotate_rows<bf16>(*r, crew);
    else rotate_rows<float>(*r, crew);
}

void rollout_activate(const RowWise* r, int64_t threads, int is_bfloat16) {
    const team::Crew crew(threads);
    if (is_bfloat16) activate_rows<bf16>(*r, crew);
    else activate_rows<float>(*r, crew);
}
}
