variable "region" {
  type = string
}

variable "environment" {
  type = string
  validation {
    condition     = can(regex("^[a-z][a-z0-9]{1,15}$", var.environment))
    error_message = "environment is a short word in lower case: it is part of every name."
  }
}

variable "zones" {
  description = "Availability zones; each has a public and a private subnet."
  type        = number
  default     = 3
  validation {
    condition     = var.zones >= 2 && var.zones <= 4
    error_message = "zones is 2 to 4: EKS and RDS need two."
  }
}

variable "nat_per_zone" {
  description = "One NAT gateway a zone survives the loss of a zone; a single one costs a third."
  type        = bool
  default     = true
}

variable "admins" {
  description = "ARNs of the roles that administer the cluster."
  type        = list(string)
}

variable "api_cidrs" {
  description = "Networks from which the cluster's API is reached; empty: from the VPC alone."
  type        = list(string)
  default     = []
  validation {
    condition     = !contains(var.api_cidrs, "0.0.0.0/0")
    error_message = "api_cidrs names networks of yours, not the whole internet."
  }
}

variable "kubernetes_version" {
  description = "EKS raises a cluster by one version at a time."
  type        = string
  default     = "1.35"
}

variable "auto_mode" {
  description = "EKS Auto Mode runs the nodes; false: the node groups below. A change takes the nodes of a live cluster away before it has others: make it while no till asks."
  type        = bool
  default     = false
}

variable "nodes" {
  type = object({ type = string, min = number, max = number })
}

variable "gpu_nodes" {
  description = "Nodes with a GPU, tainted; the group has size 0 until a pod asks for a GPU, which no step does."
  type        = object({ type = string, max = number })
  default     = { type = "g6.xlarge", max = 0 }
}

variable "valkey" {
  type = object({ type = string, shards = number, replicas = number })
}

variable "store_password" {
  description = "Password of the online store, for example of `openssl rand -hex 24`; the endpoint gets it as RECO_STORE_PASSWORD."
  type        = string
  sensitive   = true
  validation {
    condition     = can(regex("^[A-Za-z0-9!&#$^<>-]{32,128}$", var.store_password))
    error_message = "store_password has 32 to 128 characters: letters, digits and ! & # $ ^ < > -, as ElastiCache takes them."
  }
}

variable "kafka" {
  description = "Brokers of the events; null: a broker elsewhere. Users are secrets named AmazonMSK_*."
  type        = object({ type = string, brokers_per_zone = number, gib = number, secret_arns = list(string) })
  default     = null
}

variable "database" {
  description = "PostgreSQL of MLflow."
  type        = object({ type = string, gib = number, standby = bool })
}

variable "bundle_lock_days" {
  description = "How long a published bundle can be neither changed nor deleted."
  type        = number
  default     = 90
}

variable "github_repository" {
  description = "OWNER/NAME whose workflows push images, release and plan; empty: none may."
  type        = string
  default     = ""
}

variable "github_provider" {
  description = "ARN of the account's OpenID Connect provider for GitHub; empty: it has none, and one is made."
  type        = string
  default     = ""
}

variable "state_bucket" {
  description = "Bucket of Terraform's state: the workflow that plans reads it."
  type        = string
  default     = ""
  validation {
    condition     = var.github_repository == "" || var.state_bucket != ""
    error_message = "github_repository needs state_bucket: the bucket of -backend-config."
  }
}
