// How many threads a parallel loop of the calling thread may use.
#pragma once

namespace openmsa::host {

// set_num_threads' number for the calling thread, else OpenMP's (OMP_NUM_THREADS, omp_set_num_threads). 1 where more
// would hurt: inside a parallel region, whichever OpenMP runtime of the process opened it, and in forked children.
int usable_threads();

}  // namespace openmsa::host
