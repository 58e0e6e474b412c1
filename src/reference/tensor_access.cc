#include "reference/tensor_access.h"

#include "api/error.h"

namespace openmsa::reference {

void Rows::fail_type() const {
  fail(OPENMSA_INTERNAL_ERROR, "backend reference: a tensor of data type ", tensor_.dtype,
       " holds no numbers to compute with");
}

}  // namespace openmsa::reference
