// Collective ops of the ranks. They return null or an error text.
#pragma once
#include "catalogue.h"
#include "group.h"

namespace LLM_ISA {

inline const char* all_reduce(const LlmAllReduce& a) { return llm_all_reduce(a.x, a.y, a.T * a.N); }
inline const char* all_gather(const LlmAllGather& a) { return llm_all_gather(a.x, a.y, a.T, a.N, a.width); }

}  // namespace LLM_ISA
